"""Collectives are measured by the ranks of a world."""
