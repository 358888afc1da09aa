"""Every pair of features, generated from their declaration: only weights and the form of the cache change answers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llm_demo_heads import write_adapter_of_layers, write_medusa_heads, write_with_mtp_layer
from llm_demo_vision import PLACEHOLDER, write_with_tower
from llm_thread_ranks import PooledLLM, ranks_in_threads

from quire import LLM, BeamSearchParams, RequestOutput, SamplingParams
from quire_demo_model import adapter_paths, checkpoint_path, draft_paths
from quire_interfaces import ConfigError
from quire_testkit.features import (
    CHANGES_TOKENS,
    ENGINE,
    REFUSED_SETTINGS,
    covering,
    features_page,
    requests_of_pairs,
)
from quire_testkit.seeing_models import drawing

PAGE = Path(__file__).parents[3] / "docs" / "features.md"
PLAIN: dict[str, Any] = {
    "num_threads": 1,
    "max_model_len": 256,
    "max_num_seqs": 40,
    "num_gpu_blocks_override": 600,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "block_size": 8,
    "speculative_adaptive": False,
    "lora_modules": tuple(f"{name}={path}" for name, path in adapter_paths().items()),
}
REQUESTS = requests_of_pairs(max_tokens=10)
TEXTS = ["What is 17 + 25?", "Spell the word basket.", "Who are you?", "Reverse the word lamp."]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By drafter: where network and drafter are read from; under "expert parallel", the network with experts."""
    folder = tmp_path_factory.mktemp("models")
    model = write_with_tower(folder / "demo", checkpoint_path())
    drafts = {"draft model": draft_paths()["draft_model"], "EAGLE-3 drafts": draft_paths()["eagle3"]}
    drafts["Medusa drafts"] = write_medusa_heads(folder / "medusa")
    with_layer = write_with_tower(folder / "mtp", write_with_mtp_layer(folder / "glm"))
    own = {name: {"model": str(model), "speculative_model": str(path)} for name, path in drafts.items()}
    sparse = write_with_tower(folder / "sparse", write_with_mtp_layer(folder / "experts", has_experts=True))
    adapters = [
        f"{name}={write_adapter_of_layers(folder / name, Path(path))}" for name, path in adapter_paths().items()
    ]
    networks: dict[str, dict[str, Any]] = {"": {"model": str(model)}, "MTP drafts": {"model": str(with_layer)}}
    networks["expert parallel"] = {"model": str(sparse), "lora_modules": tuple(adapters)}
    return {**networks, **own}


def settings(row: dict[str, str | None]) -> dict[str, Any]:
    chosen = [ENGINE[kind][row[kind] or ""] for kind in ENGINE if row.get(kind) is not None]
    return {**PLAIN, **{key: value for each in chosen for key, value in each.items()}}


@dataclass(frozen=True)
class Answer:
    """Finish reason, tokens and text of the answers to a request, and the tokens whose log probabilities are told."""

    exact: list[Any]
    logprobs: list[float]


@dataclass(frozen=True)
class Engines:
    """What answers."""

    llm: LLM | PooledLLM
    prefill: LLM | None = None
    """Computes prompts first, whose blocks the other one reads."""

    def generate(self, prompts: list[Any], params: list[SamplingParams], adapters: list[str | None]) -> list[Any]:
        if self.prefill is not None:
            first = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
            computed = self.prefill.generate(prompts, first, use_tqdm=False, lora_request=adapters)
            params = [
                dataclasses.replace(each, extra_args={"kv_transfer_params": output.kv_transfer_params})
                for each, output in zip(params, computed, strict=True)
            ]
        return self.llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)


@contextlib.contextmanager
def engines(chosen: dict[str, Any]) -> Iterator[Engines]:
    """An engine of these settings; its ranks and stages are threads, and so are several engines."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(ranks_in_threads())
        prefill = None
        if "kv_transfer_config" in chosen:
            role = {"kv_transfer_config": {**chosen["kv_transfer_config"], "kv_role": "kv_producer"}}
            room = {"num_gpu_blocks_override": PLAIN["num_gpu_blocks_override"], "data_parallel_size": 1}
            prefill = stack.enter_context(LLM(**{**chosen, **role, **room}))
        make: Any = PooledLLM if chosen.get("data_parallel_size", 1) > 1 else LLM
        yield Engines(stack.enter_context(make(**chosen)), prefill)


def answers(engine: Engines) -> dict[tuple[str, str], Answer]:
    """Of each pair, all in one batch."""
    beams, others = BeamSearchParams(beam_width=3, max_tokens=6), ["beam search", "LoRA adapter", "media"]
    prompts, adapters = [prompt(0), prompt(1), prompt(2, num_images=1)], [None, "demo-capitals", None]
    outputs = engine.llm.beam_search(prompts, beams, lora_request=adapters)
    found = {("beam search", other): _seen(output) for other, output in zip(others, outputs, strict=True)}
    return answers_of(engine, list(REQUESTS)) | found


def answers_of(engine: Engines, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Answer]:
    """Of some pairs, in a batch of their own."""
    numbers = {pair: number for number, pair in enumerate(REQUESTS)}
    requests = [REQUESTS[pair] for pair in pairs]
    prompts = [prompt(numbers[pair], request.num_images) for pair, request in zip(pairs, requests, strict=True)]
    outputs = engine.generate(prompts, [each.params for each in requests], [each.adapter for each in requests])
    return {pair: _seen(output) for pair, output in zip(pairs, outputs, strict=True)}


def prompt(number: int, num_images: int = 0) -> dict[str, Any]:
    """Of a conversation with one turn; images of different numbers differ."""
    text = (
        f"<|im_start|>user\n{PLACEHOLDER * num_images}{TEXTS[number % len(TEXTS)]}<|im_end|>\n<|im_start|>assistant\n"
    )
    images = {"multi_modal_data": {"image": [drawing(number + each) for each in range(num_images)]}}
    return {"prompt": text, **(images if num_images else {})}


def _seen(output: RequestOutput) -> Answer:
    observed = [output.prompt_logprobs, *(one.logprobs for one in output.outputs)]
    entries = [entry for each in observed for place in each or [] for entry in (place or {}).values()]
    exact = [(one.token_ids, one.text, one.finish_reason) for one in output.outputs]
    return Answer([*exact, *(entry.token_id for entry in entries)], [entry.logprob for entry in entries])


@cache
def expected(*changes: str | None, dtype: str = "auto", **own: Any) -> dict[tuple[str, str], Answer]:
    """Answers of an engine that has nothing but the weights and the KV cache of that form, adapters on top.

    Args:
        dtype: Of weights and activations.
        own: The network, and adapters for it.
    """
    chosen = settings(dict(zip(CHANGES_TOKENS, changes, strict=True)))
    with LLM(**{**chosen, "lora_merge_after": 0, "dtype": dtype, **own}) as llm:
        return answers(Engines(llm))


@pytest.mark.parametrize("row", covering(), ids=lambda row: ", ".join(str(name) for name in row.values()))
def test_features_go_together(row: dict[str, str | None], models: dict[str, dict[str, Any]]) -> None:
    paths, merges = models.get(row["drafts"] or "", models[""]), row["weights"] == "adapters in the weights"
    if row["ranks"] == "expert parallel":
        paths = {**paths, **models["expert parallel"]}
    with engines({**settings(row), **paths}) as engine:
        llm = engine.llm
        got = [answers(engine)]
        if merges:  # one matrix in each step
            alone = [pair for pair, request in REQUESTS.items() if request.adapter is not None]
            got += [answers_of(engine, alone) for _ in range(9)]
        got.append(answers(engine))
        stats = llm.stats()
        if isinstance(llm, LLM):
            llm.engine.core.parts.check_integrity()
        else:
            llm.check_integrity()
        llm.media.reset()
        assert llm.media.preparer.num_bytes == 0, "items are held by requests that have ended"
    own = {name: value for name, value in paths.items() if name != "speculative_model"}
    dtype = settings(row).get("dtype", "auto")
    wanted = expected(*(row.get(kind) for kind in CHANGES_TOKENS), dtype=dtype, **own)
    # Another order of sums may round a quantized number to the next one.
    error = 1e-2 if row["ranks"] == "decode context parallel" else 5e-5
    for pair, answer in itertools.chain(*(round_.items() for round_ in got)):
        assert answer.exact == wanted[pair].exact, pair
        assert answer.logprobs == pytest.approx(wanted[pair].logprobs, abs=error), pair
    if row["engines"] is None:  # of several, each may have room enough for its part
        assert (stats.num_preemptions_total > 0) == (row["memory"] == "preemption")
    assert (stats.prefix_cache_hit_tokens_total > 0) == (row["prefix caching"] is not None)
    assert (stats.external_prefix_cache_hit_tokens_total > 0) == (row["tier"] is not None)
    assert (stats.num_draft_tokens_total > 0) == (row["drafts"] is not None)
    assert (stats.num_adapter_merges_total > 0) == merges


@pytest.mark.parametrize("has_context", [False, True])
def test_ranks_of_all_kinds_go_together(has_context: bool, models: dict[str, dict[str, Any]]) -> None:
    """Two engines of two stages, whose ranks share heads and experts, and the tokens of the KV cache."""
    features = [*ENGINE["ranks"].items(), *ENGINE["stages"].items(), *ENGINE["engines"].items()]
    chosen = {
        key: value
        for name, each in features
        if has_context or name != "decode context parallel"
        for key, value in each.items()
    }
    sparse = models["expert parallel"]
    wanted = expected(None, None, dtype="float32" if has_context else "auto", **sparse)
    with engines({**PLAIN, **chosen, **sparse}) as engine:
        got = answers(engine)
    for pair, answer in got.items():
        assert answer.exact == wanted[pair].exact, pair
        if has_context:  # sums are taken in another order
            assert answer.logprobs == pytest.approx(wanted[pair].logprobs, abs=5e-5), pair
        else:
            assert answer.logprobs == wanted[pair].logprobs, pair


@pytest.mark.parametrize("pair", REFUSED_SETTINGS, ids=lambda pair: ", ".join(sorted(pair)))
def test_settings_that_do_not_go_together_are_refused(pair: frozenset[str], models: dict[str, dict[str, Any]]) -> None:
    chosen = {
        key: value for kind in ENGINE.values() for name in pair & kind.keys() for key, value in kind[name].items()
    }
    place = models["expert parallel" if "expert parallel" in pair else ""]["model"]
    with pytest.raises(ConfigError, match="does not go with") as refusal:
        LLM(**{**PLAIN, "model": place, **chosen})
    assert refusal.value.field in chosen


def test_page_is_fresh() -> None:
    """Written by `python -c "from quire_testkit.features import features_page; print(features_page(), end='')"`."""
    assert PAGE.read_text() == features_page()
