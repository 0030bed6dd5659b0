"""Measurements of the machine it runs on: training, answers, tokens, collectives, files, and other programs."""
