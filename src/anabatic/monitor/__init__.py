"""Looking at the devices of a machine and at a run."""
