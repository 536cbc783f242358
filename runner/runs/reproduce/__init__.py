"""`reproduce`: runs a tracked run again, and says how far their metrics agree."""
