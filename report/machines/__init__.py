"""Profiles, clusters and stacks are printed."""
