"""Readers of data files: formats, columns, rows."""
