"""Several processes that train one model go in; what each needs to be one of them comes out: its place, and their words."""
