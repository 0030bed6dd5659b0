"""Maps of predictions."""
