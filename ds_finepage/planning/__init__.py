"""TaskGraph -> MemGraph: liveness, policies, simulator, bounds (floor 2, no torch)."""
