"""External modules are cut, divided and run here."""
