"""Pictures are drawn here; this is the one room that names matplotlib."""
