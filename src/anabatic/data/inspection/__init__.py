"""What data holds before a training reads it: lengths, languages, duplicates, leaks."""
