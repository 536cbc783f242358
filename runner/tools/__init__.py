"""Commands that look at runs from outside. Nothing below imports them."""
