"""Recipes from commands, scripts and files of other programs: their commands, scripts and files become settings of
ours."""
