"""Ways to hold states and activations on the host, and their cost."""
