"""Many runs: overrides and a machine go in; jobs, a ledger and a report come out."""
