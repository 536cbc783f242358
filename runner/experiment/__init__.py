"""One run, from its configuration to its closed tracker: the main path is run.py."""
