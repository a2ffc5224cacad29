"""The executor's limits, and the nearest plan that it can run. No room of the executor is imported
here.
"""
