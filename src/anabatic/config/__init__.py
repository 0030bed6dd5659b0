"""One dataclass file per command. Standard library only; `load.py` alone knows YAML and the CLI library."""
