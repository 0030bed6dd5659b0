"""Layers of a model divided among processes."""
