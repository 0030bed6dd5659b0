"""Scoring of answers: questions, instructions, extraction."""
