"""The plan, its parts and its file. The executor may import them."""
