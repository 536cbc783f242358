"""`explain`: takes a run up from a checkpoint before a step, replays it with the same bits, and watches that step."""
