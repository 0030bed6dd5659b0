"""What was meant by a command line that is not understood."""
