"""Sections of settings that several commands share."""
