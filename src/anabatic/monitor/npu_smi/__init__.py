"""Parsers of the outputs of npu-smi."""
