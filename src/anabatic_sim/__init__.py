"""A simulated NPU: the real torch_npu wheel on a simulated CANN, in host memory."""
