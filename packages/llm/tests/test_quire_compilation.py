"""torch.compile for networks that run through Transformers: the same tokens, few compilations, and what is refused."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.compilation import chosen_compilation
from quire.config import QuireConfig
from quire.plan import make_plan
from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

NUM_LAYERS = 3
PROMPT_LENS = (3, 17, 9, 1, 30)
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 100, "async_scheduling": False}


@pytest.fixture(scope="module")
def ernie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that Quire has none of its own for."""
    folder = tmp_path_factory.mktemp("ernie")
    case = CASES["Ernie4_5ForCausalLM"]
    fields = {**case.fields, "vocab_size": 300, "num_hidden_layers": NUM_LAYERS}
    write_checkpoint(folder, "Ernie4_5ForCausalLM", dataclasses.replace(case, fields=fields))
    write_tokenizer(folder, vocab_size=300)
    return folder


@pytest.fixture(scope="module")
def expected(ernie: Path) -> list[list[int]]:
    return generate(LLM(str(ernie), **SETTINGS))


@pytest.fixture
def no_more_than_two() -> Iterator[None]:
    """What would be compiled a third time is an error: steps of one token and of several are all there is."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def generate(llm: LLM, seed: int = 0) -> list[list[int]]:
    """Steps of many shapes: prompts of several lengths at once, then one by one, and what is decoded after them."""
    source = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [source.randrange(300) for _ in range(length)]}
        for length in (n + seed for n in PROMPT_LENS)
    ]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    for prompt in prompts[:2]:
        outputs += llm.generate([prompt], params)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.usefixtures("no_more_than_two")
def test_tokens_are_the_same_and_shapes_compile_nothing(ernie: Path, expected: list[list[int]]) -> None:
    torch._dynamo.utils.counters.clear()
    llm = LLM(str(ernie), compilation_config={}, **SETTINGS)
    assert "torch.compile (inductor)" in llm.engine_info.choices["network"]
    assert generate(llm) == expected
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert num_graphs > 0, "nothing was compiled"
    assert generate(llm, seed=1) != expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs


def test_prefixes_on_disk_are_not_those_of_another_backend(ernie: Path, tmp_path: Path) -> None:
    prompt = {"prompt_token_ids": [random.Random(1).randrange(300) for _ in range(70)]}
    cached = []
    for chosen in (None, {"backend": "eager"}, {"backend": "eager"}, None):
        tier = {"kv_disk_path": str(tmp_path / "tier"), "kv_disk_size": "50M"}
        with LLM(str(ernie), compilation_config=chosen, **tier, **SETTINGS) as llm:
            cached.append(llm.generate([prompt], SamplingParams(max_tokens=1))[0].num_cached_tokens)
    assert cached == [0, 0, 64, 64]


def test_nothing_is_compiled_by_default(ernie: Path) -> None:
    torch._dynamo.utils.counters.clear()
    for chosen in (None, {"mode": 0}, {"mode": "NONE", "backend": "inductor"}):
        config = QuireConfig.of(model=str(ernie), compilation_config=chosen)
        assert chosen_compilation(config, ModelConfig.from_path(ernie)) is None
    llm = LLM(str(ernie), compilation_config={"mode": 0}, **SETTINGS)
    assert "torch.compile" not in llm.engine_info.choices["network"]
    assert not torch._dynamo.utils.counters["stats"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"mod": 1}, "have no keys but mode and backend"),
        ({"mode": 3}, "have one of 0, NONE, 1, STOCK_TORCH_COMPILE as mode"),
        ({"mode": True}, "as mode"),
        ({"backend": "tensorrt"}, "have one of inductor, aot_eager, eager as backend"),
        ('{"mode": [1]}', "as mode"),
        ('{"backend": ["eager"]}', "as backend"),
        ("3", "--compilation-config expects a JSON object, got '3'"),
        ("{mode: 1}", "expects a JSON object"),
    ],
)
def test_values_that_mean_nothing_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuireConfig.of(compilation_config=value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_lora": True}, "does not go with adapters"),
        ({"quantization": "int8"}, "does not go with quantized weights"),
    ],
)
def test_what_it_does_not_go_with_is_refused(settings: dict[str, Any], message: str, ernie: Path) -> None:
    config = QuireConfig.of(model=str(ernie), compilation_config={"mode": "STOCK_TORCH_COMPILE"}, **settings)
    with pytest.raises(ConfigError, match=message):
        make_plan(config, ModelConfig.from_path(ernie))


def test_networks_of_our_own_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"is one of Quire's own, whose ops are compiled already; .* -O0"):
        LLM(compilation_config={"mode": 1}, enable_lora=False)
