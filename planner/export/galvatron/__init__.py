"""Galvatron."""
