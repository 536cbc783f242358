"""conf/ composed, checked whole, made safe, and turned into objects."""
