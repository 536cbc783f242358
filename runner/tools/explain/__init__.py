"""`explain`: resume a run from a checkpoint before a step, replay it bitwise identically, and watch that step."""
