"""Token files and batches."""
