"""Packs weights into few bits, and computes with them as they are packed."""
