"""A run's points and events: a journal on disk, and the uploader process that copies it to MLflow."""
