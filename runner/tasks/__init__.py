"""A model and a batch on the device go in; the loss to learn from and what to report come out, as 0-d tensors."""
