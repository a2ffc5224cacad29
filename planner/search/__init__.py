"""The search: its loop, replay, objectives, estimates, largest models and comparisons."""
