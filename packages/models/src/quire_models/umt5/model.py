"""UMT5: T5 in many languages."""

from quire_models.t5.model import T5ForConditionalGeneration

__all__ = ["UMT5ForConditionalGeneration"]


class UMT5ForConditionalGeneration(T5ForConditionalGeneration):
    """The network."""
