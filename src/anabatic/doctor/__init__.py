"""Look at a machine: what is there, whether it fits together, what to type to fix it. No torch."""
