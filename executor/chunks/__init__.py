"""Model states are moved in chunks between device and host."""
