"""Vessel trajectories: AIS readers, cleaning, segments, words, features, splits, maps."""
