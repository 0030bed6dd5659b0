"""Profiles of simulated NPUs: what torch_npu's profiler asks of `msprof`."""
