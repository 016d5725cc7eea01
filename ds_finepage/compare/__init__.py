"""Runs every engine on one model under one budget, each in a process of its own."""
