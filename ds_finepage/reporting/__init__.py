"""Summaries and traces of plans, for people and for programs."""
