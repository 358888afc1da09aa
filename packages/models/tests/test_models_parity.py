"""Every family gives the logits and greedy tokens of Transformers, however the tokens are brought in."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver
from torch import Tensor

from quire_models import DecoderLM, ModelConfig, load_model
from quire_testkit.hf_checkpoints import FAMILIES, ROPE_VARIATIONS, tiny_hf_checkpoint

PROMPT_LEN, NEW_TOKENS = 90, 64
TOLERANCE = 1e-4
"""Of the largest logit."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{family}-{rope}": (family, {"rope": rope}) for family in FAMILIES for rope in ROPE_VARIATIONS},
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha-biases": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads-gelu": ("llama", {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1}),
    "llama-yarn-mscale": (
        "llama",
        {"rope": {**ROPE_VARIATIONS["yarn"], "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "mistral-tied-window-1": ("mistral", {"sliding_window": 1, "tie_word_embeddings": True}),
    "qwen2-tied-mha": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2-window-in-last-layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-window-by-layer-type": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@dataclass
class Case:
    model: DecoderLM
    token_ids: list[int]
    """Prompt, and the greedy continuation that this engine gave after one whole prefill."""
    logits: Tensor
    """[tokens, vocab], the oracle's."""
    window: int | None
    """Window of all layers, when all slide."""

    def check(self, logits: list[Tensor]) -> None:
        got = torch.stack(logits)
        assert torch.isfinite(got).all()
        wanted = self.logits[: len(got)]
        assert (got - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, variations = CASES[request.param]
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    oracle = tiny_hf_checkpoint(folder, family, **variations)
    model = load_model(ModelConfig.from_path(folder), folder)
    rng = random.Random(request.param)
    driver = PagedDriver(model, block_size=16, shuffle=False)
    seq = driver.add([rng.randrange(model.config.vocab_size) for _ in range(PROMPT_LEN)])
    driver.run(seq, PROMPT_LEN)
    driver.greedy(seq, NEW_TOKENS)
    with torch.no_grad():
        logits = oracle(torch.tensor([seq.token_ids])).logits[0]
    windows = set(model.config.sliding_windows)
    case = Case(model, seq.token_ids, logits, windows.pop() if len(windows) == 1 else None)
    case.check(seq.logits)
    return case


def test_greedy_tokens_equal(case: Case) -> None:
    # Each token is the oracle's first choice after those before it: by induction the whole text is the oracle's.
    wanted = case.logits[PROMPT_LEN - 1 : -1].argmax(dim=-1).tolist()
    assert case.token_ids[PROMPT_LEN:] == wanted


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 8), (7, 1), (64, 8), (7, 16)])
def test_chunked_prefill_equals_whole(case: Case, chunk: int, block_size: int) -> None:
    driver = PagedDriver(case.model, block_size=block_size, shuffle=True, window=case.window)
    seq = driver.add(case.token_ids)
    driver.run(seq, chunk)
    case.check(seq.logits)


def test_batch_with_strangers(case: Case) -> None:
    rng = random.Random(5)
    driver = PagedDriver(case.model, block_size=8, shuffle=True, num_tokens=2048, window=case.window)
    seq = driver.add(case.token_ids)
    strangers = [driver.add([rng.randrange(3, 300) for _ in range(rng.randint(20, 150))]) for _ in range(7)]
    while seq.num_computed < len(seq.token_ids):
        parts = []
        for one in [seq, *strangers]:
            left = len(one.token_ids) - one.num_computed
            # Prompts in uneven chunks; what is left of the text one token at a time, as decoding does.
            decoding = one is seq and one.num_computed >= PROMPT_LEN
            if left:
                parts.append((one, 1 if decoding else min(left, rng.choice([1, 1, 5, 40]))))
        rng.shuffle(parts)
        driver.step(*parts)
    case.check(seq.logits)
