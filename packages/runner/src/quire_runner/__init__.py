"""The device side of a step: permanent rows, inputs, forward, sampling."""

__version__ = "0.1.0"

__all__: list[str] = []
