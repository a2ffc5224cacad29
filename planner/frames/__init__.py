"""The candidates of a search, their bounds and the order in which they are solved."""
