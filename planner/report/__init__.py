"""What the planner shows to people (rich) and to programs (JSON). Nothing is imported here: parts load when used."""
