"""Checkpoints: writing, manifests, listing."""
