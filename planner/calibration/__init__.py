"""A machine's profile is planned, measured, checked for coverage and fitted to runs."""
