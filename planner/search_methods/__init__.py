"""COMPARE: the planner's search beside other search methods, on one space and one price."""
