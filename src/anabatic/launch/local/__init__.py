"""Processes on one machine: start, supervision, placement."""
