"""TaskGraph -> MemGraph: liveness, policies, simulator, bounds."""
