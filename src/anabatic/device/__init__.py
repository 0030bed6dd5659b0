"""The only room that says npu or cuda: device table, detection, fused operators with their references."""
