"""The planner as a library: `find_plan` searches, `estimate_plan` prices one configuration, both return a `Plan`.

    from planner.search import find_plan
    from planner.estimate import estimate_plan

Nothing is imported here, so that importing one part never loads another.
"""
