"""Pieces of HTML and tables of pandas that a notebook shows of plans, fronts and comparisons."""
