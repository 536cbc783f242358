"""How large an answer of a tracking server may be: kept by deadline, explained to a person by mlflow_store."""

MOST_BYTES = 32 << 20  # a page of 25,000 points, the longest that is asked for, has 3 MB
TOO_LONG = "an answer of more than 32 MiB"
