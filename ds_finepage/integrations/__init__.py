"""Seams into other libraries."""
