"""The search runs here: the loop, replay, objectives, estimates, the largest model and
comparisons.
"""
