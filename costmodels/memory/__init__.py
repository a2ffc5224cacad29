"""Peak memory of a pipeline rank."""
