"""Parts of TBE that programs look up; see the package's docstring."""
