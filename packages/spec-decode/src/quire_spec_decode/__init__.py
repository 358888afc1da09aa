"""Speculative decoding: drafters propose tokens, verification keeps the ones the model would have sampled itself."""

from quire_spec_decode.config import SpecDecodeConfig, make_drafter
from quire_spec_decode.ngram import NgramDrafter
from quire_spec_decode.verify import accept_drafts

__version__ = "0.1.0"

__all__ = ["NgramDrafter", "SpecDecodeConfig", "accept_drafts", "make_drafter"]
