"""Pools that divide the batch: their ranks beside those of one pool, and the sum of gradients."""
