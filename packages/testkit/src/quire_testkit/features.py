"""The features that may be combined, as data: what each asks of an engine or of a request, and which pairs are refused.

`docs/features.md` is written from it, and a test runs every pair: settings of engines are covered pairwise by as few
engines as a greedy choice finds, and each of them serves every pair of what requests may ask for. Free of torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_interfaces import SamplingParams, StructuredOutputsParams

__all__ = [
    "ENGINE",
    "REFUSED",
    "REFUSED_SETTINGS",
    "REQUEST",
    "TOGETHER",
    "PairRequest",
    "RequestFeature",
    "covering",
    "features_page",
    "requests_of_pairs",
]

ENGINE: dict[str, dict[str, dict[str, Any]]] = {
    "weights": {
        "int8 weights": {"quantization": "int8"},
        "int4 weights": {"quantization": "int4"},
        "adapters in the weights": {"lora_merge_after": 2, "dtype": "float32"},
    },
    "KV cache": {
        "int8 KV cache": {"kv_cache_dtype": "int8"},
        "fp8 KV cache": {"kv_cache_dtype": "fp8"},
    },
    "drafts": {
        "n-gram drafts": {"speculative_method": "ngram"},
        "suffix drafts": {"speculative_method": "suffix"},
        "draft model": {"speculative_method": "draft_model"},
        "EAGLE-3 drafts": {"speculative_method": "eagle3", "speculative_eagle_topk": 4},
        "MTP drafts": {"speculative_method": "mtp", "speculative_eagle_topk": 2, "num_speculative_tokens": 2},
        "Medusa drafts": {"speculative_method": "medusa", "speculative_eagle_topk": 3, "num_speculative_tokens": 2},
    },
    "prefix caching": {"prefix caching": {"enable_prefix_caching": True}},
    "prompts": {"chunked prefill": {"max_num_batched_tokens": 56}},
    "memory": {"preemption": {"num_gpu_blocks_override": 34}},
    "steps": {"steps ahead of the device": {"async_scheduling": True}},
    "ranks": {
        "tensor parallel": {"tensor_parallel_size": 2},
        "expert parallel": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        "decode context parallel": {
            "tensor_parallel_size": 2,
            "decode_context_parallel_size": 2,
            "speculative_eagle_topk": 1,
            "dtype": "float32",
        },
    },
    "stages": {"pipeline parallel": {"pipeline_parallel_size": 2}},
    "engines": {"data parallel": {"data_parallel_size": 2}},
    "tier": {
        "KV cache in host memory": {"kv_offloading_size": 0.02, "enable_prefix_caching": True},
        "prefill/decode by connector": {
            "kv_transfer_config": {"kv_connector": "SocketConnector", "kv_role": "kv_consumer"},
            "enable_prefix_caching": True,
        },
    },
}
"""What an engine has one of -> feature -> its settings, later ones over earlier ones. What is not chosen is off. The
demo model has no companions for the last two drafters, and no experts; for these, the test says where they are.
Adapters in the weights are compared with adapters on top of them, which round otherwise: in float32."""

COSTLY = ("ranks", "stages", "engines")
"""Of these, a test has a feature only where a pair is new."""

TOGETHER = ("ranks",)
"""Of these, features go together as well: all of them at once, in a test of their own."""

CHANGES_TOKENS = ("weights", "KV cache")
"""Of these, a feature changes the numbers, and so the tokens; no other may."""


@dataclass(frozen=True, slots=True)
class RequestFeature:
    """What a request asks for."""

    params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters."""
    adapter: str | None = None
    """LoRA adapter of the demo model."""
    num_images: int = 0
    """In front of the text."""


@dataclass(frozen=True, slots=True)
class PairRequest:
    """A request that asks for two features."""

    params: SamplingParams
    adapter: str | None
    num_images: int


REQUEST: dict[str, RequestFeature] = {
    "LoRA adapter": RequestFeature(adapter="demo-capitals"),
    "structured output": RequestFeature(
        {"structured_outputs": StructuredOutputsParams(regex="[a-z]{2,9}( [A-Z]{3,})+")}
    ),
    "log probabilities": RequestFeature({"logprobs": 3, "prompt_logprobs": 1}),
    "temperature, top-p, seed": RequestFeature({"temperature": 0.9, "top_p": 0.95, "seed": 5}),
    "edits of logits": RequestFeature(
        {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "logit_bias": {40: 2.0}, "dry_multiplier": 0.8}
    ),
    "several answers": RequestFeature({"n": 3}),
    "stop strings": RequestFeature({"stop": ("e",)}),
    "beam search": RequestFeature(),
    "media": RequestFeature(num_images=1),
}

REFUSED: dict[frozenset[str], str] = {
    frozenset({"beam search", name}): why
    for name, why in {
        "structured output": "beams are ranked by the network's own probabilities, without a mask",
        "log probabilities": "a beam reports the probability of its sequence, not of its tokens",
        "edits of logits": "edited logits would rank the beams otherwise than their probabilities",
        "stop strings": "beams are compared as tokens, and a string may end within one",
    }.items()
}
"""Pairs that a request cannot have -> why. The error carries the code `unsupported_combination`."""

REFUSED_SETTINGS: dict[frozenset[str], str] = {
    frozenset({of, name}): why
    for of in ("tensor parallel", "expert parallel", "decode context parallel", "pipeline parallel")
    for name, why in {
        "adapters in the weights": "ranks would put an adapter into their weights at different steps",
        "steps ahead of the device": "ranks run steps one by one, and stages in turn",
    }.items()
}
"""Pairs that an engine cannot have -> why. Refused when it starts (ConfigError)."""


def covering() -> list[dict[str, str | None]]:
    """Choices of at most one feature per kind of engine setting, so that each pair of features is in one of them."""
    left = {
        frozenset({(one, a), (other, b)})
        for one, other in itertools.combinations(ENGINE, 2)
        for a in ENGINE[one]
        for b in ENGINE[other]
        if frozenset({a, b}) not in REFUSED_SETTINGS
    }
    rows: list[dict[str, str | None]] = []
    while left:
        row: dict[str, str | None] = dict(sorted(next(iter(sorted(left, key=sorted)))))
        for kind in sorted(ENGINE, key=lambda kind: -len(ENGINE[kind])):
            if kind not in row:
                allowed = [
                    name
                    for name in ENGINE[kind]
                    if not any(frozenset({name, chosen}) in REFUSED_SETTINGS for chosen in row.values())
                ]
                row[kind] = max(
                    allowed, key=lambda name: sum(_pair(kind, name, item) in left for item in row.items()), default=None
                )
                is_new = any(_pair(kind, row[kind] or "", item) in left for item in row.items())
                if kind in COSTLY and not is_new:
                    row[kind] = None
        left -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append(row)
    return rows


def _pair(kind: str, name: str, item: tuple[str, str | None]) -> frozenset[tuple[str, str | None]]:
    return frozenset({(kind, name), item})


def requests_of_pairs(max_tokens: int) -> dict[tuple[str, str], PairRequest]:
    """A request per pair of request features that goes together, and per feature alone (paired with itself). Without
    beam search, which is no request of its own."""
    names = [name for name in REQUEST if name != "beam search"]
    requests = {}
    for one, other in itertools.combinations_with_replacement(names, 2):
        fields = {"temperature": 0.0, **REQUEST[one].params, **REQUEST[other].params}
        if fields.get("n", 1) > 1 and not fields["temperature"]:
            fields |= {"temperature": 0.7, "seed": 3}
        requests[one, other] = PairRequest(
            SamplingParams(max_tokens=max_tokens, **fields),
            REQUEST[one].adapter or REQUEST[other].adapter,
            max(REQUEST[one].num_images, REQUEST[other].num_images),
        )
    return requests


def features_page() -> str:
    """docs/features.md."""
    names = [name for choices in ENGINE.values() for name in choices] + list(REQUEST)
    kinds = {name: kind for kind, choices in ENGINE.items() for name in choices}
    head = "| | " + " | ".join(str(number + 1) for number in range(len(names))) + " |\n|---|" + "---|" * len(names)
    rows = []
    for number, name in enumerate(names):
        cells = [_cell(name, other, kinds) if place < number else "" for place, other in enumerate(names)]
        rows.append(f"| {number + 1} {name} | " + " | ".join(cells) + " |")
    reasons, settings = (
        "\n".join(f"- {' with '.join(sorted(pair))}: {why}." for pair, why in refused.items())
        for refused in (REFUSED, REFUSED_SETTINGS)
    )
    return _PAGE.format(table="\n".join([head, *rows]), reasons=reasons, settings=settings)


def _cell(one: str, other: str, kinds: Mapping[str, str]) -> str:
    if one in kinds and kinds[one] == kinds.get(other):
        return "yes" if kinds[one] in TOGETHER else "one of"
    return "no" if frozenset({one, other}) in {**REFUSED, **REFUSED_SETTINGS} else "yes"


_PAGE = """# Which features go together

Features are orthogonal: each goes with each other, or the pair is refused with a reason. **yes**: a test runs the two
together, on the demo model behind a random vision tower, and finds the tokens, texts and log probabilities that the
same weights and the same form of KV cache give without any other feature. **one of**: an engine has one of the two.
**no**: refused, see below.

{table}

Refused when they are asked for, by an error with the code `unsupported_combination`:

{reasons}

Refused when an engine starts, by an error that names the setting:

{settings}

MTP layers and Medusa heads, which the demo model has none of, have weights made up for the test: Medusa heads beside
the demo model, and an MTP layer in its checkpoint, written as a GLM-4.5 without experts, whose function is the same.

"media" is an image in the prompt. Towers and their connectors keep the checkpoint's weights: they are not quantized,
and an adapter that changes them is refused. A drafter sees the placeholders of an image, and the target's states.

Adapters in the weights are compared with adapters on top of them, which round otherwise, in float32; where weights
are quantized they stay on top.

Ranks, stages and engines ([parallelism](parallelism.md)) are threads in this test, two of each kind; what they do as
processes, tests of their own say. Expert parallel runs a form of the demo model with one more layer, which has experts.
Decode context parallel takes sums in another order: it gives the same tokens in float32, with log probabilities that
differ in their last digits, and drafts are chains beside it. Prefill/decode by connector is a prefill engine beside
the one whose answers are compared, which reads the blocks of every prompt from it.

`min_tokens` is refused together with structured output, which alone says when an output may end. What a feature does
not go with besides other features (kinds of networks, of adapters, of checkpoints) stands on its own page: see
[LoRA](lora.md), [media](media.md), [quantization](quantization.md), [structured output](structured-output.md) and
[sampling](sampling.md).
"""
