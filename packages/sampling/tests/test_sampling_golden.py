"""Tokens of a seed stay what they were, for every option, alone and together with others: `golden_tokens.json`.

Run as a program, this prints that file anew, for a change that means to give other tokens.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from quire_interfaces import SamplingParams
from quire_sampling import Sampler, SamplingState

GOLDEN_FILE = Path(__file__).with_name("golden_tokens.json")
NUM_PROMPT_TOKENS = 3
NUM_POSITIONS = 12
VOCAB_SIZES = (37, 700)

_EDITS: dict[str, dict[str, object]] = {
    "no edit": {},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": {3: 4.0, 8: -100.0, 20: 6.5}},
    "allowed_token_ids": {"allowed_token_ids": (1, 2, 5, 8, 13, 21, 34)},
    "bad_words": {"bad_words_token_ids": ((5,), (1, 2), (4, 4, 9))},
    "min_tokens": {"min_tokens": 7},
    "dry": {"dry_multiplier": 2.5, "dry_allowed_length": 1, "dry_sequence_breakers": (6,)},
    "dry of the latest tokens": {"dry_multiplier": 4.0, "dry_range": 8, "dry_sequence_breakers": ()},
    "all edits": {
        "repetition_penalty": 0.8, "frequency_penalty": 0.3, "logit_bias": {7: 5.0}, "bad_words_token_ids": ((7, 8),),
        "min_tokens": 4, "dry_multiplier": 1.0, "dry_sequence_breakers": (), "allowed_token_ids": tuple(range(30)),
    },
}  # fmt: skip
_SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "plain": {"temperature": 0.9},
    "top_k": {"top_k": 6},
    "large top_k": {"top_k": 300, "temperature": 1.7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05, "temperature": 1.3},
    "all filters": {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "top_n_sigma": {"top_n_sigma": 1.2},
    "dynamic temperature": {"dynatemp_range": 0.7, "dynatemp_exponent": 1.5},
    "xtc": {"xtc_probability": 0.6, "xtc_threshold": 0.04, "top_p": 0.97},
    "mirostat 1": {"mirostat_mode": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.4},
    "mirostat 2": {"mirostat_mode": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.4, "top_k": 2},
    "all of them": {"top_n_sigma": 2.0, "dynatemp_range": 0.5, "xtc_probability": 0.5, "min_p": 0.02},
}
CASES = {
    f"{edit}, {way}": SamplingParams(**{**_EDITS[edit], **_SAMPLING[way]})  # type: ignore[arg-type]
    for edit, way in itertools.product(_EDITS, _SAMPLING)
}


def tokens_of_each_case(vocab_size: int) -> dict[str, list[int]]:
    """One token per output position of every case, all cases in one batch: each row's history is what it sampled."""
    rng = random.Random(vocab_size)
    state = SamplingState(len(CASES), vocab_size)
    history = torch.zeros(len(CASES), NUM_PROMPT_TOKENS + NUM_POSITIONS, dtype=torch.int64)
    for row, params in enumerate(CASES.values()):
        state.set_row(row, params, seed=1000 + row, num_prompt_tokens=NUM_PROMPT_TOKENS, stop_token_ids=(2, 30))
        history[row, :NUM_PROMPT_TOKENS] = torch.tensor([4, 4, 1 + row % 5])
    for position in range(NUM_PROMPT_TOKENS - 1, NUM_PROMPT_TOKENS + NUM_POSITIONS - 1):
        logits = torch.tensor([12 * rng.random() ** 4 - 3 for _ in range(vocab_size)]).repeat(len(CASES), 1)
        positions = torch.full((len(CASES),), position)
        output = Sampler(state).sample(logits, range(len(CASES)), positions, history)
        assert output.failed_rows() == {}
        history[:, position + 1] = output.token_ids
    tokens = history[:, NUM_PROMPT_TOKENS:].tolist()
    return dict(zip(CASES, tokens, strict=True))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_tokens_of_a_seed_are_those_of_before(vocab_size: int) -> None:
    assert tokens_of_each_case(vocab_size) == json.loads(GOLDEN_FILE.read_text())[str(vocab_size)]


if __name__ == "__main__":
    golden = {str(vocab_size): tokens_of_each_case(vocab_size) for vocab_size in VOCAB_SIZES}
    lines = json.dumps(golden, indent=0).replace(",\n", ", ").replace("[\n", "[").replace("\n]", "]")
    print(lines.replace('], "', '],\n"'))
