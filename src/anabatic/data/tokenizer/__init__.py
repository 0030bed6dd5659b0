"""Tokenizers: training, loading, comparison."""
