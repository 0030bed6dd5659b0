"""What checks can find: messages and fixes, in English and Chinese."""
