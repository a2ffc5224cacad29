"""The operations that a profile times."""
