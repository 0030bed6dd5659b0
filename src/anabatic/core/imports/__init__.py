"""Imports that wait until they are used."""
