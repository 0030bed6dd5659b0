"""The `anabatic` command: a table of lazy commands, 20-40 lines each."""
