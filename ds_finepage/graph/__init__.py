"""Plain data: taskgraph, memgraph, timeline, hardware profiles, and their files."""
