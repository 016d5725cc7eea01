"""What other systems do, as policies in the same simulator (floor 2, no torch)."""
