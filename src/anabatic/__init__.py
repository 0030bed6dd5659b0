"""anabatic: train language models on Ascend NPUs, NVIDIA GPUs and CPUs with one tool."""

__version__ = "0.1.0"
