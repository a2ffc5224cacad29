"""The operators of each part of a described model."""
