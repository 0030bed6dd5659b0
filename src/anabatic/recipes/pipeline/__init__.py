"""Pipelines: stages that run one after another."""
