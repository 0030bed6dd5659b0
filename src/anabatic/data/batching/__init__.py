"""Batches: order, packing, mixtures, loading."""
