"""The data that flows: taskgraph, memgraph, timeline, profiles, and their checker."""
