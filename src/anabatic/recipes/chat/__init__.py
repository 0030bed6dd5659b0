"""Chat in the terminal."""
