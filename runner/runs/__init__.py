"""What is done with a run that has trained: measured again, asked for new rows, exported, served, registered, repeated, read."""
