"""Measured records become the curves of a profile."""
