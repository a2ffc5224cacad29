"""Times the operations of a profile on a machine."""
