"""The command line, one module a subcommand (floor 5)."""
