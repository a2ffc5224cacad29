"""The executor's limits, and the nearest plan that it can run; imports no room of the executor."""
