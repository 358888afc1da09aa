"""XLMRoberta: BERT with its positions behind that of padding."""

from quire_models.bert.model import BertModel

__all__ = ["XLMRobertaModel"]


class XLMRobertaModel(BertModel):
    """The network, without what stands behind its hidden states."""
