"""Sizes of a decoder, read from a config.json."""
