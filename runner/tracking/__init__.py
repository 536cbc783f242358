"""A run's points and events: a journal on disk, and MLflow's copy of it, made by a process beside the training."""
