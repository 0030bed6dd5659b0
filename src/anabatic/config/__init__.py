"""One dataclass file per command, and how they are filled: files, flags, checks. Starts without torch."""
