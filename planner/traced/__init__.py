"""A traced module is cut into shards and planned."""
