"""Everything that lives as long as a model is attached."""
