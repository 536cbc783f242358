"""What came of a sweep: a table, CSV, JSON and one page that opens without a network. Made from the sweep's folder alone."""
