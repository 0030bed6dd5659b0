"""Standard-library foundation: errors, logging, paths, JSON lines. All packages import it; it imports none."""
