"""Models built from depth, Hugging Face folders, the packed forward pass and the chunked loss."""
