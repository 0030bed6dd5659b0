"""Bits per byte and tasks with a chance level."""
