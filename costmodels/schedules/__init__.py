"""Pipeline schedules are written as action lists and simulated."""
