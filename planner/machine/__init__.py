"""A machine's own profile: what to measure, what is missing, and factors from runs."""
