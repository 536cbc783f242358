"""Points and events go in; a journal on disk, and MLflow's copy of it, come out."""
