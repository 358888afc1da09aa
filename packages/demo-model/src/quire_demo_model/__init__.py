"""The embedded demo model: a small chat model in Hugging Face format, for trying and testing everything offline.

Knows where its files lie. Knows nothing about loading or running a model, and imports the standard library only.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["__version__", "checkpoint_path"]

__version__ = "0.1.0"


def checkpoint_path() -> Path:
    """The folder with ``config.json``, ``model.safetensors``, ``tokenizer.json`` and the chat template."""
    return Path(__file__).resolve().parent / "checkpoint"
