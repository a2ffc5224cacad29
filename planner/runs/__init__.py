"""A run or a dry run is set beside its prediction."""
