"""From files to batches: readers, chat rendering, tokenizers, shards, packing, the resumable loader."""
