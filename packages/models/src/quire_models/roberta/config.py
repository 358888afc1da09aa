"""The config.json of Roberta."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.bert.config import BertConfig, bert_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> BertConfig:
    """Positions begin behind that of padding."""
    return bert_fields(config, position_offset=config.integer("pad_token_id", default=1, minimum=0) + 1)
