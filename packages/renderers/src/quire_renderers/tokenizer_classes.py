"""What the name of a tokenizer class says that no file does: which settings outweigh tokenizer.json.

Knows the classes of `transformers` 4, by which published checkpoints were made. Five kinds of them write the
post-processor of tokenizer.json anew from `add_bos_token` and `add_eos_token`; every other class, and `transformers` 5
for all but GPT-NeoX, leaves it alone:

| class | begin token without add_bos_token | end token without add_eos_token |
|---|---|---|
| Llama, CodeLlama, Gemma, Cohere | post-processor; yes if it adds no tokens to any text | post-processor |
| GPTNeoX | no | no |
| all others | post-processor, whatever the flags say | post-processor, whatever the flags say |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quire_interfaces import CheckpointError

__all__ = [
    "SurroundingTokens",
    "bert_normalizer",
    "has_token_types",
    "prefix_space",
    "reads_sentencepiece_plainly",
    "surrounding_tokens",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SurroundingTokens:
    """Which tokens a class puts around a text. A side that is None is the post-processor's."""

    bos_token: str
    """The begin token where tokenizer_config.json names none."""
    eos_token: str
    """The end token where tokenizer_config.json names none."""
    bos: bool | None = None
    eos: bool | None = None
    bos_by_default: bool = False
    """The begin token is put where neither a flag nor the post-processor says anything."""


_LLAMA = SurroundingTokens(bos_token="<s>", eos_token="</s>", bos_by_default=True)
_SURROUNDING = {
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "GemmaTokenizer": SurroundingTokens(bos_token="<bos>", eos_token="<eos>", bos_by_default=True),
    "CohereTokenizer": SurroundingTokens(
        bos_token="<BOS_TOKEN>", eos_token="<|END_OF_TURN_TOKEN|>", bos_by_default=True
    ),
    "GPTNeoXTokenizer": SurroundingTokens(bos_token="<|endoftext|>", eos_token="<|endoftext|>", bos=False, eos=False),
}
"""Classes that write the post-processor anew, without the ending "Fast", with what they do where no flag is set."""

_LOWER_CASE = {
    "BertTokenizer",
    "DistilBertTokenizer",
    "DPRContextEncoderTokenizer",
    "DPRQuestionEncoderTokenizer",
    "DPRReaderTokenizer",
    "ElectraTokenizer",
    "FunnelTokenizer",
    "LayoutLMTokenizer",
    "LayoutLMv2Tokenizer",
    "LxmertTokenizer",
    "MobileBertTokenizer",
    "MPNetTokenizer",
    "SplinterTokenizer",
    "SqueezeBertTokenizer",
}
"""Classes that write BERT's normalizer anew from do_lower_case, strip_accents and tokenize_chinese_chars."""

_PREFIX_SPACE = {
    "BartTokenizer",
    "CodeGenTokenizer",
    "DebertaTokenizer",
    "GPT2Tokenizer",
    "GPTNeoXTokenizer",
    "LEDTokenizer",
    "LongformerTokenizer",
    "MvpTokenizer",
    "RobertaTokenizer",
    "WhisperTokenizer",
}
"""Classes that take add_prefix_space from their settings."""

_OWN_SENTENCEPIECE = {
    "AlbertTokenizer",
    "BarthezTokenizer",
    "BertGenerationTokenizer",
    "BigBirdTokenizer",
    "CamembertTokenizer",
    "CpmTokenizer",
    "DebertaV2Tokenizer",
    "FNetTokenizer",
    "LayoutXLMTokenizer",
    "MBart50Tokenizer",
    "MBartTokenizer",
    "MLukeTokenizer",
    "MT5Tokenizer",
    "NllbTokenizer",
    "PegasusTokenizer",
    "PLBartTokenizer",
    "ReformerTokenizer",
    "RemBertTokenizer",
    "SeamlessM4TTokenizer",
    "SiglipTokenizer",
    "T5Tokenizer",
    "UdopTokenizer",
    "XGLMTokenizer",
    "XLMRobertaTokenizer",
    "XLNetTokenizer",
}
"""Classes that number the pieces of a sentencepiece model otherwise than it does, or add tokens of their own."""


_TOKEN_TYPES = {
    "",  # named by the model alone, which is of a kind that has them
    "BertTokenizer",
    "DPRContextEncoderTokenizer",
    "DPRQuestionEncoderTokenizer",
    "DPRReaderTokenizer",
    "DebertaTokenizer",
    "DebertaV2Tokenizer",
    "ElectraTokenizer",
    "FNetTokenizer",
    "LxmertTokenizer",
    "MobileBertTokenizer",
}
"""Classes whose pairs have token types where tokenizer_config.json does not say."""


def _class_name(settings: dict[str, Any]) -> str:
    name = settings.get("tokenizer_class")
    return name.removesuffix("Fast") if isinstance(name, str) else ""


def surrounding_tokens(settings: dict[str, Any], source: str) -> SurroundingTokens | None:
    """What the class of these settings puts around a text; None for a class that leaves it to the post-processor.

    Args:
        settings: tokenizer_config.json, with the class of config.json where it names none.
        source: Name of the file in errors.

    Raises:
        CheckpointError: a flag is neither true nor false.
    """
    tokens = _SURROUNDING.get(_class_name(settings))
    if tokens is None:
        return None
    for name in ("add_bos_token", "add_eos_token"):
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, bool):
            raise CheckpointError(f"{source}: {name} must be true or false, is {value!r}")
        tokens = replace(tokens, bos=value) if name == "add_bos_token" else replace(tokens, eos=value)
    return tokens


def bert_normalizer(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Fields of BERT's normalizer that the class of these settings replaces; None for a class that replaces none."""
    if _class_name(settings) not in _LOWER_CASE:
        return None
    accents = settings.get("strip_accents")
    return {
        "lowercase": bool(settings.get("do_lower_case", True)),
        "strip_accents": None if accents is None else bool(accents),
        "handle_chinese_chars": bool(settings.get("tokenize_chinese_chars", True)),
    }


def prefix_space(settings: dict[str, Any]) -> bool | None:
    """Whether the class of these settings puts a space before a text; None for a class that leaves it to the file."""
    return bool(settings.get("add_prefix_space", False)) if _class_name(settings) in _PREFIX_SPACE else None


def reads_sentencepiece_plainly(settings: dict[str, Any]) -> bool:
    """Whether the ids of a sentencepiece model are those of the class."""
    return _class_name(settings) not in _OWN_SENTENCEPIECE


def has_token_types(settings: dict[str, Any]) -> bool:
    """Whether networks get the token types that the post-processor gives to a pair of texts: as `model_input_names`
    says, or else the class."""
    names = settings.get("model_input_names")
    return _class_name(settings) in _TOKEN_TYPES if names is None else "token_type_ids" in names
