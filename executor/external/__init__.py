"""A module that is not the executor's own is cut, divided and run here."""
