"""Composes conf/, checks the configuration as a whole, and builds objects from it."""
