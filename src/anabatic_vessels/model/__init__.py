"""Models of vessel classes: network, trees, features."""
