"""Hugging Face and ModelScope: models, data sets and uploads by name."""
