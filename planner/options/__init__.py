"""What the user typed -> what the planner takes."""
