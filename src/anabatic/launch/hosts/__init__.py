"""Several machines over ssh."""
