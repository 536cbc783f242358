"""`plan`: simulate a run, also on a missing device. `lr-find`: find a learning rate. `tune`: find the fastest settings."""
