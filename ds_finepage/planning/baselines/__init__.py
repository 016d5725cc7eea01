"""Other systems, as policies in the same simulator."""
