"""Plain FSDP2."""
