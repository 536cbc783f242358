"""A run's configuration goes in; what it would do on a device that need not be here comes out: nothing is computed."""
