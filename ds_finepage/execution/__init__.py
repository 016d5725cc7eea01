"""MemGraph in, effects out: arena, lanes, host stores, executor."""
