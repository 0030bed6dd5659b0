"""Inspect data before training: lengths, languages, duplicates, leaks."""
