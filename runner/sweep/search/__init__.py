"""Search with Optuna: which jobs to run next, and when to prune one."""
