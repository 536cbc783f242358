"""What one job of a sweep is: its configuration, its line in the ledger, its slot, its process."""
