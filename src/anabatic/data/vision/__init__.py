"""Pictures in rows: found, decoded, cut into patches, given their tokens, and collated."""
