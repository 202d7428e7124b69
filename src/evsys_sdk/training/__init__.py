"""Weights: the loop that changes them, the losses that say how, the checkpoints that keep them."""
