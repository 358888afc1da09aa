"""Checkpoints of processors, without weights. Makes `multimodal_processors` and `multimodal_samples` importable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def processor_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a checkpoint with the processor of a family, made when it is first asked for."""
    from multimodal_processors import save_processor

    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            save_processor(family, folders[family])
        return folders[family]

    return folder
