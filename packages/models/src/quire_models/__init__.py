"""The networks: one folder per model type, with weight names and configuration."""

__version__ = "0.1.0"

__all__: list[str] = []
