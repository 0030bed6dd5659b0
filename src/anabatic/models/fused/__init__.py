"""Fused operators inside models of transformers."""
