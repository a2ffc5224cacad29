"""The fields of a plan as a launcher's arguments."""
