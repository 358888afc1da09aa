"""What the files of a checkpoint set that nothing was made of, for the report at the start. Free of torch."""

from __future__ import annotations

from pathlib import Path

from quire.config import ModelSettings
from quire.generation_config import generation_note
from quire_models.gguf.folder import unread_metadata
from quire_models.made_folder import is_mistral_format

__all__ = ["checkpoint_notes"]


def checkpoint_notes(settings: ModelSettings, folder: Path) -> list[str]:
    """One line for each file that sets something of the kind.

    Raises:
        CheckpointError: a generation_config.json that cannot be used.
    """
    notes = [generation_note(settings, folder)]
    if is_mistral_format(folder):
        from quire_models.mistral_format.folder import mistral_notes  # most starts do without

        notes += mistral_notes(folder)
    if unread := unread_metadata(folder):
        notes.append(f"metadata of the GGUF file that is not read: {', '.join(unread)}")
    return [note for note in notes if note]
