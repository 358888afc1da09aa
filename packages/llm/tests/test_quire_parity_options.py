"""What a configuration can say beyond the case of its architecture, where situations matter: each against Transformers,
in every situation.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import greedy_continuation, write_checkpoint
from quire_testkit.parity.verify import verify_architecture
from quire_testkit.tokenizers import write_tokenizer


def longrope(original: int) -> dict[str, Any]:
    """Requests of these tests have 134 tokens."""
    short, long = [[1.0 + step * pair for pair in range(6)] for step in (0.1, 0.7)]
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": short,
            "long_factor": long,
        },
    }


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-long-factors": ("Phi3ForCausalLM", longrope(original=32)),
    "phi3-short-factors": ("Phi3ForCausalLM", longrope(original=200)),
}
"""Name -> architecture, and fields that differ from its case."""


@pytest.mark.parametrize("option", OPTIONS)
def test_option_is_transformers(option: str) -> None:
    architecture, fields = OPTIONS[option]
    case = CASES[architecture]
    assert verify_architecture(architecture, dataclasses.replace(case, fields={**case.fields, **fields})).failures == {}


def test_max_model_len_decides_the_factors(tmp_path: Path) -> None:
    case = CASES["Phi3ForCausalLM"]
    case = dataclasses.replace(case, fields={**case.fields, **longrope(original=48), "vocab_size": 320})
    oracle = write_checkpoint(tmp_path, "Phi3ForCausalLM", case)
    write_tokenizer(tmp_path, vocab_size=320)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for prompt_len, max_model_len in ((30, 48), (50, None)):
        prompt = random.Random(7).choices(range(3, 200), k=prompt_len)
        expected = greedy_continuation(oracle, prompt, 8).token_ids
        with LLM(tmp_path, dtype="float32", max_model_len=max_model_len, num_gpu_blocks_override=80) as llm:
            rotation = next(note for note in llm.engine_info.extra["notes"] if note.startswith("rotation"))
            assert ("by the short factors" in rotation) == (max_model_len == 48)
            [output] = llm.generate([{"prompt_token_ids": prompt}], params)
        assert output.outputs[0].token_ids == expected
