"""Checkpoints are written, read and resumed from."""
