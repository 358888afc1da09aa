"""Falcon Mamba (Zuo et al. 2024, arXiv:2410.05355): Mamba whose time steps and projections are normalised."""

from __future__ import annotations

from quire_models.mamba.model import MambaForCausalLM

__all__ = ["FalconMambaForCausalLM"]


class FalconMambaForCausalLM(MambaForCausalLM):
    """The Falcon Mamba network."""
