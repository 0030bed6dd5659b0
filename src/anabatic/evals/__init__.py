"""Bits per byte and tasks with a baseline."""
