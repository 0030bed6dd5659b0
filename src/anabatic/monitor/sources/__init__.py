"""Sources of device readings: npu-smi, DCMI, NVML, the host."""
