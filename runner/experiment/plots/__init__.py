"""Draws what a run measured and predicted, as PNG files. For figures.py."""
