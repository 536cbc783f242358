"""The training step: as it is written, compiled, as CUDA graphs, or in parts that fit the memory. choose.py says which."""
