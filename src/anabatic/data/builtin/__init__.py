"""Data that the program makes itself."""
