"""PRICE: pure functions from numbers to seconds and bytes."""
