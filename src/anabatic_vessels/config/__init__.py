"""Settings of the vessel commands (`classify ...`)."""
