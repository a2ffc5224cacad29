"""Runs, dry runs and parity checks are printed."""
