"""The training loop, the optimizer and the states that training has."""
