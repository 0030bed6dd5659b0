"""Layers of stacked experts: fused products, ranks that share experts, what routers do."""
