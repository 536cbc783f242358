"""Parts go in, a trained model comes out: loop, step, evaluation, checkpoints, metrics."""
