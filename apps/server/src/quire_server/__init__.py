"""The OpenAI-compatible server, the command line and the chat page."""

__version__ = "0.1.0"

__all__: list[str] = []
