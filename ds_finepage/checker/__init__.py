"""Decides whether a plan may run; shares no code with the planner."""
