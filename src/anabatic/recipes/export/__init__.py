"""Export of models: merging, checkpoints, GGUF, serving configurations."""
