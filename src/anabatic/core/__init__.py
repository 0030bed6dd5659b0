"""Standard-library foundation: errors, logging, paths, JSON lines. Imported by everyone, imports no one."""
