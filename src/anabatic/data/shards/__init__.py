"""Tokenized shards on disk and their cache."""
