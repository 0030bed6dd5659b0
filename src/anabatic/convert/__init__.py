"""Recipes from what other programs are told: their commands, scripts and files become settings of ours."""
