"""`tune`: measure which settings are fastest on this machine and give the same numbers."""
