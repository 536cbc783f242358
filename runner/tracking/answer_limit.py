"""The size limit of a tracking server's answer."""

MOST_BYTES = 32 << 20  # a page of 25,000 points, the largest request, has 3 MB
TOO_LONG = "an answer of more than 32 MiB"
