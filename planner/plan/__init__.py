"""The plan, its parts and its file: this is what the executor may read."""
