"""Every tensor op: typed signature, torch reference, backend table."""

__version__ = "0.1.0"

__all__: list[str] = []
