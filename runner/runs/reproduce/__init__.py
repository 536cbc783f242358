"""`reproduce`: run a tracked run again, and compare the metrics."""
