"""Torch in, TaskGraph out (floor 2)."""
