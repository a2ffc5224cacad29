"""A run is observed here: spans, memory and progress."""
