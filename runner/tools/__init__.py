"""Tools that look at runs from outside: watch, compare, diff and try. Nothing below imports them."""
