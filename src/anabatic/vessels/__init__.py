"""Vessel trajectories: AIS files to words, training and use of classifiers, maps."""
