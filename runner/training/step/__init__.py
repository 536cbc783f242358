"""How one step of the training is taken: eagerly, compiled, as graphs of the device, or in pieces that fit its memory."""
