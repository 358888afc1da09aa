"""Where a drafting network's keys and values go: which group of the target they follow, and which networks can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire_interfaces import (
    ConfigError,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCachePlan,
    KVCacheSpec,
    LatentAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
)
from quire_spec_decode.draft_cache import draft_group, draft_specs

SIZES = {"block_size": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "bfloat16"}
FULL = FullAttentionSpec(**SIZES)
WINDOW = SlidingWindowSpec(**SIZES, sliding_window=16)
CROSS = CrossAttentionSpec(**SIZES, max_encoder_tokens=32)
LATENT = LatentAttentionSpec(block_size=4, width=24, dtype="bfloat16")
STATES = MambaSpec(block_size=4, states=(StateTensor("conv", (4, 3), "float32"),))


def plan_of(*specs: KVCacheSpec) -> KVCachePlan:
    groups = tuple(KVCacheGroup(spec=spec, layer_names=(f"layer{i}",)) for i, spec in enumerate(specs))
    return KVCachePlan(groups=groups, num_blocks=8, tensor_block_bytes=(specs[0].block_bytes,))


@pytest.mark.parametrize(
    ("specs", "group"),
    [([FULL], 0), ([WINDOW, FULL], 1), ([STATES, LATENT], 1), ([FULL, CROSS], 0), ([STATES, WINDOW, FULL, CROSS], 2)],
)
def test_drafts_follow_the_group_that_keeps_every_token(specs: list[KVCacheSpec], group: int) -> None:
    assert draft_group(plan_of(*specs)) == group


@pytest.mark.parametrize("specs", [[WINDOW], [STATES], [CROSS], [STATES, WINDOW]])
def test_without_such_a_group_other_methods_are_named(specs: list[KVCacheSpec]) -> None:
    with pytest.raises(ConfigError, match="ngram or suffix, or medusa or mlp_speculator") as caught:
        draft_group(plan_of(*specs))
    assert caught.value.field == "speculative_method"


def test_windows_of_a_drafting_network_are_kept_whole() -> None:
    assert draft_specs({"a": FULL, "b": WINDOW}) == (FULL, ("a", "b"))
    assert draft_specs({"a": LATENT}) == (LATENT, ("a",))


@pytest.mark.parametrize(
    ("specs", "complaint"),
    [
        ({"a": FULL, "b": STATES}, "keeps recurrent states"),
        ({"a": FULL, "b": replace(FULL, head_dim=16)}, "keys of different sizes"),
        ({"a": FULL, "b": LATENT}, "keys of different sizes"),
        ({}, "keys of different sizes"),
    ],
)
def test_networks_that_cannot_draft_are_refused(specs: dict[str, KVCacheSpec], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        draft_specs(specs)
    assert caught.value.field == "speculative_model"
