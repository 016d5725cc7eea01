"""What other systems do, as policies in the same simulator."""
