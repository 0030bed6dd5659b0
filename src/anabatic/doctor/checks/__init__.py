"""Checks of a machine: each module looks at one thing and yields findings."""
