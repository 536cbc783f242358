"""Splits go in; their batches on the device come out, from memory or from processes that read."""
