"""Profile files of other planners, read as records of this one."""
