"""Data sets of Hugging Face's datasets library, from its cache or from files."""
