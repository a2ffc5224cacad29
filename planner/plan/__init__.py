"""The plan, its parts and its file: what the executor may read."""
