"""Evaluation tasks: definitions, loading, prompts."""
