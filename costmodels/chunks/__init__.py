"""Model states in chunks: their layout, their schedule, their memory and their time."""
