"""Times of words by the engine: which heads follow what is said, and what observes them. Importing this module loads no
torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import quire_runner
from quire.blueprint import Blueprint
from quire.config import QuireConfig
from quire_interfaces import CheckpointError, read_json
from quire_pooling.checkpoint import network_folder

if TYPE_CHECKING:
    from quire_models import Network
    from quire_models.layers.encoder_decoder import EncoderDecoderLM
    from quire_runner import AlignmentPooler

__all__ = ["alignment_heads", "alignment_pooler"]


def alignment_heads(config: QuireConfig, folder: Path) -> Sequence[tuple[int, int]]:
    """(layer, head) of those that the checkpoint names; none where it names none, or where ranks share the network,
    each of which has a part of the heads."""
    path = network_folder(folder) / "generation_config.json"
    num_ranks = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    if not path.is_file() or num_ranks > 1:
        return ()
    heads: Any = read_json(path).get("alignment_heads") or ()
    try:
        return tuple((int(layer), int(head)) for layer, head in heads)
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{path}: alignment_heads must be pairs of a layer and a head, got {heads!r:.200}"
        ) from None


def alignment_pooler(blueprint: Blueprint, network: Network) -> AlignmentPooler | None:
    """What aligns texts with what the network hears; None where the checkpoint does not say how.

    Raises:
        CheckpointError: it names heads that the network does not have.
    """
    folder = blueprint.folder
    heads = alignment_heads(blueprint.config, folder)
    if not heads:
        return None
    try:
        return quire_runner.AlignmentPooler(cast("EncoderDecoderLM", network), heads)
    except ValueError as error:
        raise CheckpointError(f"{folder}/generation_config.json, alignment_heads: {error}") from None
