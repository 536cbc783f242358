"""The report of a sweep: a table, CSV, JSON and one page that opens without a network, made from the sweep directory."""
