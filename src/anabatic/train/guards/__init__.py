"""Guards of a training: bad steps, spikes, early stopping."""
