"""Questions to the planner and their answers."""
