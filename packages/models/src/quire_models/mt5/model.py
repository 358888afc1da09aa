"""mT5: T5 in many languages."""

from quire_models.t5.model import T5ForConditionalGeneration

__all__ = ["MT5ForConditionalGeneration"]


class MT5ForConditionalGeneration(T5ForConditionalGeneration):
    """The network."""
