"""Requests to the planner and the recommendations it returns."""
