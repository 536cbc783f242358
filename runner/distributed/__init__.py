"""What each of several processes that train one model needs: its place, their words, the gradients, a part of the model."""
