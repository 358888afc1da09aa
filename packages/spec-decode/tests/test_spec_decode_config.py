"""Settings of speculative decoding, and the drafter they make."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire_interfaces import ConfigError
from quire_spec_decode import NgramDrafter, SpecDecodeConfig, make_drafter


def test_default_is_none() -> None:
    assert make_drafter(SpecDecodeConfig()) is None


def test_ngram() -> None:
    config = SpecDecodeConfig(method="ngram", num_speculative_tokens=5, prompt_lookup_min=1, prompt_lookup_max=3)
    drafter = make_drafter(config)
    assert isinstance(drafter, NgramDrafter)
    assert (drafter.min_n, drafter.max_n) == (1, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "eagle4"),
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", 2.5),
        ("prompt_lookup_min", 0),
        ("prompt_lookup_min", 5),  # above the default maximum
        ("prompt_lookup_max", 65),
        ("prompt_lookup_max", "4"),
    ],
)
def test_what_cannot_work_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        SpecDecodeConfig(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field
    assert repr(value) in str(refused.value)


def test_trees() -> None:
    config = SpecDecodeConfig(method="eagle3", num_speculative_tokens=5, eagle_topk=8)
    assert (config.most_draft_tokens, config.most_slots_ahead) == (20, 40)
    config = SpecDecodeConfig(method="eagle", num_speculative_tokens=5, eagle_topk=2, num_draft_tokens=12)
    assert (config.most_draft_tokens, config.most_slots_ahead) == (12, 10)
    config = SpecDecodeConfig(method="eagle", num_speculative_tokens=5)
    assert (config.most_draft_tokens, config.most_slots_ahead) == (5, 5)
    assert SpecDecodeConfig().most_draft_tokens == SpecDecodeConfig(method="ngram").most_slots_ahead == 0
    refused = {
        "are for the methods": {"method": "ngram", "eagle_topk": 2},
        "bounds a draft tree": {"method": "eagle3", "num_draft_tokens": 9},
        "at least num_speculative_tokens": {
            "method": "eagle3", "num_speculative_tokens": 9, "eagle_topk": 4, "num_draft_tokens": 8,
        },
    }  # fmt: skip
    for why, settings in refused.items():
        with pytest.raises(ConfigError, match=why):
            SpecDecodeConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["dflash", "medusa", "draft_model", "ngram", "none"])
def test_only_heads_may_draft_one_after_another_instead(method: str) -> None:
    for head in ("eagle", "eagle3"):
        assert not SpecDecodeConfig(method=head, parallel_drafting=False).parallel_drafting
    with pytest.raises(ConfigError, match=f"eagle, eagle3, and method is '{method}'") as refused:
        SpecDecodeConfig(method=method, parallel_drafting=False)
    assert refused.value.field == "parallel_drafting"


def test_needs_neither_torch_nor_numpy() -> None:
    check = "import sys, quire_spec_decode; assert not {'torch', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
