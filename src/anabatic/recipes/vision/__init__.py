"""The commands of `anabatic vision`."""
