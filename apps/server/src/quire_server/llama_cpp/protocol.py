"""Bodies of llama.cpp's server, and what they mean in the words of the OpenAI routes. Knows no engine.

Source of the names: the reference of llama.cpp's server (tools/server/README.md).
"""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BeforeValidator, Field

from quire_interfaces import PoolingParams, PoolingTask, RequestError
from quire_server.config import MAX_PROMPTS
from quire_server.pooling_protocol import CommonFields, PoolingInput
from quire_server.protocol import SMALL_LIST, LenientBody
from quire_server.request_fields import Int, Objects, Prompts, Texts, at_most

__all__ = [
    "SAMPLERS",
    "LlamaCompletionRequest",
    "LlamaEmbeddingRequest",
    "LlamaInfillRequest",
]


def _whole(value: Any) -> Any:
    """40.0 as 40: clients in languages with one kind of number send it so."""
    return int(value) if type(value) is float and value.is_integer() else value


Whole = Annotated[Int, BeforeValidator(_whole)]

SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "penalties": ("e", {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}),
    "dry": ("d", {"dry_multiplier": 0.0}),
    "top_n_sigma": ("s", {"top_n_sigma": 0.0}),
    "top_k": ("k", {"top_k": 0}),
    "typ_p": ("y", {"typical_p": 1.0}),
    "top_p": ("p", {"top_p": 1.0}),
    "min_p": ("m", {"min_p": 0.0}),
    "xtc": ("x", {"xtc_probability": 0.0}),
    "temperature": ("t", {"temperature": 1.0}),
    "infill": ("i", {}),
}
"""Name of a sampler -> its letter, and the fields with which it does nothing. The order is always Quire's."""
_SAME_NAME = (
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p",
    "xtc_probability", "xtc_threshold", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_sequence_breakers", "mirostat_tau", "mirostat_eta", "ignore_eos", "stop", "stream",
    "model",
)  # fmt: skip
_OTHER_NAME = {"repeat_penalty": "repetition_penalty", "dry_penalty_last_n": "dry_range", "mirostat": "mirostat_mode"}
"""llama.cpp's field -> the OpenAI routes'."""
RANDOM_SEEDS = (-1, 2**32 - 1)


class LlamaCompletionRequest(LenientBody):
    """Body of POST /completion."""

    prompt: Any = None
    """Text, token ids, a mixture of both, an object with `prompt_string`, or a list of these."""
    model: str | None = None
    n_predict: Whole | None = Field(default=None, validation_alias=AliasChoices("n_predict", "max_tokens"))
    n_cmpl: Whole | None = Field(default=None, validation_alias=AliasChoices("n_cmpl", "n"))
    stream: bool = False
    temperature: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = Field(default=None, validation_alias=AliasChoices("typical_p", "typ_p"))
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Whole | None = None
    dry_penalty_last_n: Whole | None = None
    dry_sequence_breakers: Texts | None = None
    mirostat: Whole | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    samplers: Texts | str | None = None
    seed: Whole | None = None
    ignore_eos: bool | None = None
    stop: str | Texts | None = None
    logit_bias: list[Any] | dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    n_probs: Whole = 0
    post_sampling_probs: bool = False
    cache_prompt: bool = True
    id_slot: Whole = -1
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: Texts | None = None
    lora: Objects | None = None
    priority: Int = 0

    def check_supported(self) -> None:
        """Refuse what is understood but not served.

        Raises:
            RequestError: naming the field and what to do instead.
        """
        if self.post_sampling_probs:
            raise RequestError(
                "post_sampling_probs is not served: probabilities are those before any sampler; leave it out",
                param="post_sampling_probs",
                code="unsupported",
            )
        if self.grammar and self.json_schema is not None:
            raise RequestError("grammar and json_schema exclude each other; leave one of them out", param="json_schema")

    def prompts(self) -> tuple[list[Any], bool]:
        """Each prompt as text or as a list of texts and token ids, and whether there were several.

        Raises:
            RequestError: naming the one that is no prompt.
        """
        value = self.prompt
        is_several = isinstance(value, list) and not any(type(part) is int for part in value) and bool(value)
        values = value if is_several else [value]
        if len(values) > MAX_PROMPTS:
            raise RequestError(f"prompt holds {len(values)} prompts, at most {MAX_PROMPTS} are allowed", param="prompt")
        places = [f"prompt[{index}]" if is_several else "prompt" for index in range(len(values))]
        return [_prompt(each, place) for each, place in zip(values, places, strict=True)], is_several

    def completion_fields(self, adapter: str | None) -> dict[str, Any]:
        """Fields of a completion, but for its prompt and what needs a tokenizer.

        Args:
            adapter: Name of the adapter that `lora` chooses.

        Raises:
            RequestError: naming the field at fault.
        """
        fields = {name: getattr(self, name) for name in _SAME_NAME}
        fields |= {ours: getattr(self, theirs) for theirs, ours in _OTHER_NAME.items()}
        if self.temperature is not None:
            fields["temperature"] = max(0.0, self.temperature)
        if self.top_k is not None:
            fields["top_k"] = max(-1, self.top_k)
        for name in ("top_p", "typical_p"):
            if fields[name] is not None:
                fields[name] = min(1.0, fields[name])
        fields["seed"] = None if self.seed in RANDOM_SEEDS else self.seed
        off = set() if self.samplers is None else SAMPLERS.keys() - self._samplers()
        if self.repeat_last_n == 0:
            off.add("penalties")
        if self.dry_penalty_last_n == 0:
            off.add("dry")
        for name in off:
            fields |= SAMPLERS[name][1]
        constraint: dict[str, Any] | None = {"grammar": self.grammar} if self.grammar else None
        if self.json_schema is not None:
            constraint = {"json": self.json_schema}
        fields |= {
            "structured_outputs": constraint,
            "n": self.n_cmpl,
            "logprobs": self.n_probs if self.n_probs > 0 else None,
            "cache_salt": None if self.cache_prompt else secrets.token_hex(16),
            "priority": self.priority,
        }
        if adapter is not None:
            fields["model"] = adapter
        given = {name: value for name, value in fields.items() if value is not None}
        num_tokens = None if self.n_predict is None or self.n_predict < 0 else self.n_predict
        return {**given, "max_tokens": num_tokens, "echo": num_tokens == 0}  # the prompt alone may be asked for

    def _samplers(self) -> set[str]:
        letters = {letter: name for name, (letter, _) in SAMPLERS.items()}
        names = list(self.samplers or ())
        if isinstance(self.samplers, str):
            names = [letters.get(letter, letter) for letter in names]
        for name in names:
            if name not in SAMPLERS:
                raise RequestError(
                    f"samplers must be of {', '.join(SAMPLERS)}, got {reprlib.repr(name)}", param="samplers"
                )
        return set(names)

    def chosen_adapter(self, adapters: list[str]) -> str | None:
        """Name of the adapter that `lora` chooses; None for the network as it is.

        Args:
            adapters: Names by id.

        Raises:
            RequestError: it chooses more than one whole adapter.
        """
        chosen = [each for each in self.lora or () if each.get("scale", 1.0) != 0]
        if not chosen:
            return None
        number, scale = chosen[0].get("id"), chosen[0].get("scale", 1.0)
        if len(chosen) > 1 or scale != 1.0:
            raise RequestError(
                "lora may choose one adapter with the scale 1; merge others into a checkpoint",
                param="lora",
                code="unsupported",
            )
        if type(number) is not int or not 0 <= number < len(adapters):
            raise RequestError(
                f"lora[0].id must be that of an adapter (GET /lora-adapters lists {len(adapters)}), got "
                f"{reprlib.repr(number)}",
                param="lora",
            )
        return adapters[number]

    def field_names(self) -> dict[str, str]:
        """The engine's name of a field -> llama.cpp's."""
        names = {ours: theirs for theirs, ours in _OTHER_NAME.items()}
        names |= {"max_tokens": "n_predict", "logprobs": "n_probs", "n": "n_cmpl"}
        own = "grammar" if self.grammar else "json_schema"
        constraint = ("structured_outputs", "structured_outputs.json", "structured_outputs.grammar")
        return {**names, **dict.fromkeys(constraint, own)}

    def bias_entries(self) -> list[tuple[Any, float]]:
        """`logit_bias` as pairs of a token id or a text, and what is added.

        Raises:
            RequestError: an entry is neither.
        """
        value = self.logit_bias or []
        pairs = [[key, bias] for key, bias in value.items()] if isinstance(value, Mapping) else value
        result = []
        for index, pair in enumerate(pairs):
            is_pair = isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (int, str)
            if not is_pair or not (pair[1] is False or type(pair[1]) in (int, float)):
                raise RequestError(
                    f"logit_bias[{index}] must be a token id or a text with a number or false, got "
                    f"{reprlib.repr(pair)}",
                    param="logit_bias",
                )
            token = int(pair[0]) if isinstance(value, Mapping) and pair[0].isdecimal() else pair[0]
            result.append((token, -100.0 if pair[1] is False else float(pair[1])))
        return result


def _prompt(value: Any, place: str) -> Any:
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            raise RequestError(
                f"{place}.multimodal_data is not read here: send images, videos and sounds to /v1/chat/completions",
                param=f"{place}.multimodal_data",
                code="unsupported",
            )
        value = value.get("prompt_string")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(part) in (int, str) for part in value):
        return value
    what = "is required" if value is None else f"must be text, token ids, or a list of them, got {reprlib.repr(value)}"
    raise RequestError(f"{place} {what}", param=place)


class LlamaInfillRequest(LlamaCompletionRequest):
    """Body of POST /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[Objects, at_most(1024)] | None = None

    def chunks(self) -> list[tuple[str, str]]:
        """Name and text of each further file.

        Raises:
            RequestError: one has no text.
        """
        result = []
        for index, each in enumerate(self.input_extra or ()):
            name, text = each.get("filename", ""), each.get("text")
            if not isinstance(name, str) or not isinstance(text, str):
                place = f"input_extra[{index}]"
                raise RequestError(f"{place} must be an object with filename and text", param=place)
            result.append((name, text))
        return result


class LlamaEmbeddingRequest(CommonFields):
    """Body of POST /embedding and /embeddings."""

    prompt_field: ClassVar[str] = "content"
    content: Prompts | None = None
    input: Prompts | None = None
    embd_normalize: Whole = 2

    @property
    def is_large(self) -> bool:
        value = self.input if self.content is None else self.content
        return self._is_large or (isinstance(value, list) and len(value) > SMALL_LIST)

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        return PoolingParams(task=task, use_activation=self.embd_normalize == 2)

    def inputs(self) -> list[PoolingInput]:
        """What is to be read. Raises RequestError when there is nothing."""
        name = "input" if self.content is None else "content"
        value: Any = getattr(self, name)
        if not value:
            raise RequestError("content must hold a text", param="content")
        if isinstance(value, str) or isinstance(value[0], int):
            return [PoolingInput(name, prompt=value)]
        return [PoolingInput(f"{name}[{index}]", prompt=each) for index, each in enumerate(value)]
