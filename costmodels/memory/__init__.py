"""The peak memory of a pipeline rank is found here, action by action."""
