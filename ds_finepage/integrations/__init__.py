"""Seams into other libraries (floor 4)."""
