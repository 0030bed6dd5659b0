"""Models that see: their parts, and the forward pass of their towers."""
