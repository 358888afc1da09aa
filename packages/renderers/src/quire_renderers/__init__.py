"""Messages to tokens and tokens to text: chat templates, tokenizers, incremental detokenizing."""

__version__ = "0.1.0"

__all__: list[str] = []
