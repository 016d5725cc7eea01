"""Summaries and traces of plans, for people and for programs (floor 2, no torch)."""
