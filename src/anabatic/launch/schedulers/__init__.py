"""Slurm and Ray."""
