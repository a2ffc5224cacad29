"""Model states in chunks that move between device and host."""
