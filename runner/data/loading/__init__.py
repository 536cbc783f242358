"""Batches of splits on the device, from memory or read by worker processes."""
