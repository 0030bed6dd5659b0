"""The commands as functions of Python, and a run as an object."""
