"""LoRA adapters: layers, loading, merging."""
