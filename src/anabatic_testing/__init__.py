"""Shipped test helpers: spawn(fn, world_size), tiny model, tiny tokenizer."""
