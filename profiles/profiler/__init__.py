"""A machine is measured: one case in one process, journalled, and fitted to curves."""
