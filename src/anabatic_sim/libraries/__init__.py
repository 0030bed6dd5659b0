"""The libraries of a simulated machine: torch_npu's wheel, and ours, compiled or from a wheel."""
