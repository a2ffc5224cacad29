"""Schemes of parallel training that no search uses, priced by their formulas."""
