"""Runs the training loop, the optimizer and the training states."""
