"""Watches steps, real ones or those of a simulated device: what they read, which tensors meet where, what they take."""
