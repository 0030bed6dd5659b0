"""Process group, collectives that work at world size 1, and shard(model)."""
