"""A run that has trained goes in; what it is worth, what it says of new rows, and its model for others come out."""
