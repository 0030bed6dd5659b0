"""Conversations: formats, templates, loss masks, preference pairs."""
