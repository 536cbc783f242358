"""Use a trained run: resume, reproduce, evaluate, predict, export, serve, register, explain and read it."""
