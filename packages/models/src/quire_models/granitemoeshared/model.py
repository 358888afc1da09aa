"""Granite's mixtures of experts beside a feed-forward network that every token uses; see `granitemoe`."""

from __future__ import annotations

from quire_models.granitemoe.model import GraniteMoeForCausalLM

__all__ = ["GraniteMoeSharedForCausalLM"]


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """The network; the shared part is in the configuration."""
