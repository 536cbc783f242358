"""A run that was tracked goes in; the same one again comes out, and how far their metrics agree."""
