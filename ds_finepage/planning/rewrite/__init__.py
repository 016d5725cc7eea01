"""Rewrites of taskgraphs and memgraphs before and after planning."""
