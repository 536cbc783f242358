"""One run, from its configuration to its closed tracker: the main path (run.py), and all that stands around a training."""
