"""Configurations of Hugging Face as fields of a ModelSpec: families, their keys, their parts."""
