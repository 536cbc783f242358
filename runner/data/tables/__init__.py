"""CSV and Parquet files: their columns, statistics and rows as tensors."""
