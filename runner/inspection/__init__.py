"""Steps that are looked at, on a device or a simulated one: what they read, what meets where, what they take."""
