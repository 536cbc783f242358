"""Trains several models that differ in numbers alone as one with one more dimension. For a sweep's jobs (sweep.batch)."""
