"""The programs that run plans, and the search that asks each of them for its own best plan."""
