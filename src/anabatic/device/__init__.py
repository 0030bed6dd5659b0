"""The only package with device-specific code: device table, detection, fused operators with their references."""
