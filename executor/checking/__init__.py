"""Checks a plan before it runs: dry run, and parity with one process."""
