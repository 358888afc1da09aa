"""The tiny configuration with which each architecture is verified. Free of torch and transformers.

A line here, a line in `quire_models.registry`, and an architecture is held to parity by the tests.
"""

from __future__ import annotations

from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.dense_cases import DENSE_CASES
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.fallback_cases import FALLBACK_CASES, FALLBACK_SAMPLE
from quire_testkit.parity.head_cases import HEAD_CASES, HEAD_SAMPLE
from quire_testkit.parity.media_cases import MEDIA_CASES, MEDIA_SAMPLE
from quire_testkit.parity.moe_cases import MOE_CASES
from quire_testkit.parity.recurrent_cases import RECURRENT_CASES

__all__ = ["CASES", "SUITE"]

CASES: dict[str, ParityCase] = {
    **FALLBACK_CASES, **DENSE_CASES, **MOE_CASES, **RECURRENT_CASES, **ENCODER_CASES, **HEAD_CASES,
    **MEDIA_CASES,
}  # fmt: skip
"""Architecture -> its case. Every architecture of `quire_models.ARCHITECTURES` has one; the others run through
Transformers."""

_SAMPLED = FALLBACK_CASES.keys() | HEAD_CASES.keys() | MEDIA_CASES.keys()
SUITE = (*sorted(CASES.keys() - _SAMPLED), *FALLBACK_SAMPLE, *HEAD_SAMPLE, *MEDIA_SAMPLE)
"""Architectures that the test suite verifies: all with a network of our own, and a sample of the others."""
