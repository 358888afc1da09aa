"""Speculative decoding: drafters propose tokens, verification keeps the ones the model would have sampled itself."""

from quire_spec_decode.config import HEAD_METHODS, LAST_STATE_METHODS, NETWORK_METHODS, SpecDecodeConfig, make_drafter
from quire_spec_decode.controller import DraftController
from quire_spec_decode.ngram import NgramDrafter
from quire_spec_decode.suffix import SuffixDrafter
from quire_spec_decode.trees import Draft, Level, best_tree, depths, paths
from quire_spec_decode.verify import accept_drafts, accept_tree, nodes_of

__version__ = "0.1.0"

__all__ = [
    "HEAD_METHODS",
    "LAST_STATE_METHODS",
    "NETWORK_METHODS",
    "Draft",
    "DraftController",
    "Level",
    "NgramDrafter",
    "SpecDecodeConfig",
    "SuffixDrafter",
    "accept_drafts",
    "accept_tree",
    "best_tree",
    "depths",
    "make_drafter",
    "nodes_of",
    "paths",
]
