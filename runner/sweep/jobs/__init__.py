"""One job of a sweep: its configuration, its line in the ledger, its slot, its process."""
