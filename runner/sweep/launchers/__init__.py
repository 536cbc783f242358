"""Where the jobs of a sweep run: on this machine, on a Ray cluster, in Slurm's queue. hydra/launcher says which."""
