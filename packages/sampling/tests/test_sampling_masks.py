"""Token masks: exactly the tokens whose bit is set can be sampled, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire_interfaces import SamplingParams
from quire_sampling import Sampler, SamplingState, TokenMasks, apply_token_masks_
from quire_sampling.masks import apply_on_device_


def bitmask_of(allowed: list[np.ndarray], vocab_size: int) -> Tensor:
    """[M, W] int32 of boolean rows [V]."""
    num_words = -(-vocab_size // 32)
    flags = np.zeros((len(allowed), num_words * 32), dtype=bool)
    flags[:, :vocab_size] = np.asarray(allowed)
    return torch.from_numpy(np.packbits(flags, axis=1, bitorder="little").view(np.int32))


@settings(deadline=None, max_examples=60)
@given(
    vocab_size=st.sampled_from([1, 31, 32, 33, 1000, 5003]),
    density=st.sampled_from([0.0, 0.001, 0.05, 0.5, 0.999, 1.0]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_equals_setting_each_token(vocab_size: int, density: float, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    num_rows = 4
    indices = data.draw(st.permutations(range(num_rows)))[: data.draw(st.integers(1, num_rows))]
    allowed = [rng.random(vocab_size) < density for _ in indices]
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab_size)).astype(np.float32))
    expected = logits.clone()
    for index, flags in zip(indices, allowed, strict=True):
        expected[index, torch.from_numpy(~flags)] = -torch.inf
    masks = TokenMasks(indices, bitmask_of(allowed, vocab_size))
    on_device = logits.clone()
    apply_token_masks_(logits, masks)
    assert torch.equal(logits, expected)
    apply_on_device_(on_device, masks)
    assert torch.equal(on_device, expected)


def test_bits_beyond_the_vocabulary_mean_nothing() -> None:
    logits = torch.zeros(2, 33)
    bitmask = torch.full((2, 2), -1, dtype=torch.int32)
    bitmask[1] = torch.tensor([0, -2], dtype=torch.int32)
    apply_token_masks_(logits, TokenMasks([0, 1], bitmask))
    assert logits[0].isfinite().all()
    assert not logits[1].isfinite().any()


@pytest.mark.parametrize("bitmask", [torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int64)])
def test_masks_must_fit(bitmask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be int32 \[1, 2\]"):
        apply_token_masks_(torch.zeros(1, 33), TokenMasks([0], bitmask))


def sample(params: list[SamplingParams], logits: Tensor, masks: TokenMasks | None) -> tuple[list[int], list[object]]:
    num_rows, vocab_size = logits.shape
    state = SamplingState(num_rows, vocab_size)
    for row, each in enumerate(params):
        state.set_row(row, each, seed=row, num_prompt_tokens=1)
    history = torch.zeros(num_rows, 8, dtype=torch.int32)
    positions = torch.zeros(num_rows, dtype=torch.int64)
    output = Sampler(state).sample(logits.clone(), list(range(num_rows)), positions, history, masks)
    return output.token_ids.tolist(), [output.failures(), output.logprobs()]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), temperature=st.sampled_from([0.0, 1.0, 1.5, 50.0]))
def test_only_allowed_tokens_are_sampled(seed: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.standard_normal((5, 700)).astype(np.float32)) * 5
    allowed = [rng.random(700) < density for density in (0.002, 0.3, 0.99)]
    for flags in allowed:
        flags[rng.integers(700)] = True
    options = [{}, {"top_k": 20}, {"top_p": 0.5}, {"min_p": 0.2}, {"presence_penalty": 1.0}]
    params = [SamplingParams(temperature=temperature, **each) for each in options]  # type: ignore[arg-type]
    tokens, _ = sample(params, logits, TokenMasks([0, 2, 4], bitmask_of(allowed, 700)))
    free, _ = sample(params, logits, None)
    for row, flags in zip([0, 2, 4], allowed, strict=True):
        assert flags[tokens[row]]
    assert [tokens[1], tokens[3]] == [free[1], free[3]], "rows without a mask are sampled as if there were none"


def test_log_probabilities_are_those_before_the_mask() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    flags = np.zeros(100, dtype=bool)
    flags[7] = True
    params = [SamplingParams(temperature=0, logprobs=2)] * 3
    tokens, (_, logprobs) = sample(params, logits, TokenMasks([1], bitmask_of([flags], 100)))
    assert tokens[1] == 7
    for row in range(3):
        expected = torch.log_softmax(logits[row].double(), -1)
        position = logprobs[row]  # type: ignore[index]
        assert position.logprobs[0] == pytest.approx(float(expected[tokens[row]]), abs=1e-5)
        assert position.logprobs[1] == pytest.approx(float(expected.max()), abs=1e-5)


def test_an_empty_mask_fails_its_row_alone() -> None:
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    flags = np.zeros(64, dtype=bool)
    _, (failures, _) = sample([SamplingParams()] * 2, logits, TokenMasks([1], bitmask_of([flags], 64)))
    assert list(failures) == [1]
    assert "structured_outputs" in failures[1]  # type: ignore[index]
