"""Sizes go in; plain torch modules come out. A person's own class, named by `_target_`, stands on the same footing."""
