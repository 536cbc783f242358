"""Where the jobs of a sweep run: this machine, a Ray cluster, Slurm."""
