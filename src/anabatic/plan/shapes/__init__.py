"""What a decoder is made of: its sizes, read from a config.json."""
