"""The first run on GPUs: each path that only they have, beside the same on the CPU."""
