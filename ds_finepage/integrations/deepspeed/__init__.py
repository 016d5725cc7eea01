"""The seam to DeepSpeed."""
