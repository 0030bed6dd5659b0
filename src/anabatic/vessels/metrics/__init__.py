"""Scores of vessel classifiers."""
