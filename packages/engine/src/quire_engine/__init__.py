"""The step loop, its process and its client: requests in, tokens out."""

__version__ = "0.1.0"

__all__: list[str] = []
