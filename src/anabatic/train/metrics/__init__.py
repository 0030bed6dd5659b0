"""Metrics of a run and where they are written."""
