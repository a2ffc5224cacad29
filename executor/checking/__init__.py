"""A plan is checked before it runs: dry run and parity with one process."""
