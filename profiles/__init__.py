"""Models, machines and their measurements."""
