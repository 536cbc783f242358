"""Trainings that differ in numbers alone take their steps together, as one model with one more dimension."""
