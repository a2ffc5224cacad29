"""Strategies of other systems, priced like the planner's own."""
