"""Pipeline stages, their messages and the runtime of an action list."""
