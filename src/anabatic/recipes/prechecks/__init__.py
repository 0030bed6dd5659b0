"""Checks of a job before anything heavy is imported."""
