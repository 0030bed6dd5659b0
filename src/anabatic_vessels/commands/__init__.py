"""The `classify` commands."""
