"""Torch in, TaskGraph out."""
