"""mBART (Liu et al. 2020): BART with its norms before the parts."""

from quire_models.bart.model import BartForConditionalGeneration

__all__ = ["MBartForConditionalGeneration"]


class MBartForConditionalGeneration(BartForConditionalGeneration):
    """The network."""
