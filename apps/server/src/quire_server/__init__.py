"""The OpenAI-compatible server, the command line and the chat page. Nothing is imported until it is used."""

__version__ = "0.1.0"

__all__: list[str] = []
