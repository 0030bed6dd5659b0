"""One engine, one method: generate."""
