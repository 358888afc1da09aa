"""The embedded demo model: a small chat model in Hugging Face format, for trying and testing everything offline.

Knows where its files lie. Knows nothing about loading or running a model, and imports the standard library only.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["__version__", "adapter_paths", "checkpoint_path", "draft_paths", "vision_paths"]

__version__ = "0.1.0"


def checkpoint_path() -> Path:
    """The folder with ``config.json``, ``model.safetensors``, ``tokenizer.json`` and the chat template."""
    return Path(__file__).resolve().parent / "checkpoint"


def adapter_paths() -> dict[str, Path]:
    """Name -> folder of each LoRA adapter of the model, in PEFT's layout: they answer in capitals, and as JSON."""
    folder = Path(__file__).resolve().parent / "adapters"
    return {path.name: path for path in sorted(folder.iterdir())}


def draft_paths() -> dict[str, Path]:
    """What can draft for the model: method of speculation -> folder."""
    folder = Path(__file__).resolve().parent
    return {"draft_model": folder / "draft", "eagle3": folder / "eagle3"}


def vision_paths() -> tuple[Path, Path]:
    """Folders of what makes the model see: the tower with connector, processor, tokenizer and chat template, and the
    LoRA adapter that reads images."""
    folder = Path(__file__).resolve().parent / "vision"
    return folder, folder / "demo-vision"
