"""Sources (files, built-in sets) go in; splits of tensors and loaders come out."""
