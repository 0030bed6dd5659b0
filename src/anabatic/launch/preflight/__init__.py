"""Checks of machines and links before a job on several machines."""
