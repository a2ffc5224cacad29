"""The planner as a library.

`find_plan` searches, `estimate_plan` prices one configuration, and both return a `Plan`:

    from parplan.planner.search.find_plan import find_plan
    from parplan.planner.search.estimate import estimate_plan

Nothing is imported here, so that importing one part never loads another.
"""
