"""Fronts, comparisons, the largest model and infeasible requests are printed."""
