"""Start one process per device through the elastic agent of torch. No torch at module level."""
