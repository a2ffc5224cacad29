"""Observes a run: spans, memory and progress."""
