"""A sweep's folder goes in; what came of it comes out: a table, CSV, JSON and one page that opens without a network."""
