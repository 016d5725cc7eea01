"""The default policy."""
