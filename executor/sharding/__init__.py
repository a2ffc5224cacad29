"""Placement, ZeRO sharding and overlapped tensor parallelism of parameters."""
