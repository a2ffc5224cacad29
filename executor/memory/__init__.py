"""Recompute, saved tensors, host copies and the token table on the host."""
