"""When nothing fits: by how much, and what would."""
