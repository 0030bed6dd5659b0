"""Loading of settings: files, options, validation, templates."""
