"""Launchers (hydra/launcher): run the jobs of a sweep on this machine, on a Ray cluster, or with Slurm."""
