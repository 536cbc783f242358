"""Trains several models that differ only in numbers as one, with one more dimension. For a sweep's jobs (sweep.batch)."""
