"""Trajectories as words: encoding, rows, spatial cells."""
