"""Which jobs a search tries next, and when it gives one up: Optuna, asked and told."""
