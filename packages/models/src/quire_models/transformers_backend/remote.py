"""Networks of code that a checkpoint brings (`auto_map` of its config.json), for users who trust it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError, read_json
from quire_models.transformers_backend.chosen_class import ChosenClassLM
from quire_models.transformers_backend.kinds import CAUSAL

__all__ = ["RemoteCodeLM"]


class RemoteCodeLM(ChosenClassLM):
    """A network of the class in the checkpoint's folder. Building one runs the code there."""

    def find_class(self, folder: Path) -> Any:
        """See `ChosenClassLM.find_class`. The name is a file of the folder and a class in it: nothing is fetched."""
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        name = read_json(folder / "config.json")["auto_map"][CAUSAL]
        try:
            return get_class_from_dynamic_module(name, str(folder), local_files_only=True)
        except Exception as error:  # whatever somebody else's code raises
            raise CheckpointError(
                f"{folder}: the checkpoint's own code ({name}) cannot be loaded: {type(error).__name__}: {error}"
            ) from error
