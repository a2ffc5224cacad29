"""Every mesh, micro-batch and schedule is a candidate here, with its legality and its lower
bounds.
"""
