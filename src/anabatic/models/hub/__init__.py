"""Download of models from hubs."""
