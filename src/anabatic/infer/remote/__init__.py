"""Inference servers of others, asked over HTTP."""
