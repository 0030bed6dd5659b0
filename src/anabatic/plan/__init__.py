"""Estimates: memory and time of a training from the model's shape, before anything is loaded."""
