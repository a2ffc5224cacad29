"""SHOW: the terminal, JSON and plots."""
