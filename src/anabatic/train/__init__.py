"""The loop (when), the step (how), optimizer, schedule, checkpoints, metrics, report."""
