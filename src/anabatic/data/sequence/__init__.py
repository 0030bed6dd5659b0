"""Sequences for classification: labels, masking, cropping."""
