"""What a stage before the last one learns of the tokens that the last one sampled. Stages are threads here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire_distributed import Collectives, run_thread_ranks
from quire_interfaces import SamplingParams
from quire_interfaces.step import NewRow, SchedulerOutput
from quire_kv_cache import kv_plan_of_layers, plan_kv_cache
from quire_models import ModelConfig, build_model
from quire_runner import PipelineRunner, RunnerConfig

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def runner_of(group: Collectives) -> PipelineRunner:
    """A stage of a network with random weights."""
    config = ModelConfig.from_dict(FIELDS)
    model = build_model(config, dtype="float32", pp_group=group)
    generator = torch.Generator().manual_seed(group.rank)
    for parameter in model.parameters:
        parameter.tensor = torch.randn(parameter.shape, generator=generator) * 0.2
    model.finish_loading()
    plan = plan_kv_cache(config.kv_cache_specs(4, "float32"), num_blocks=16)
    own = kv_plan_of_layers(plan, model.config.network.cache_names())
    limits = RunnerConfig(max_num_seqs=2, max_model_len=32, max_num_batched_tokens=32, num_speculative_tokens=3)
    runner = PipelineRunner.for_model(model, own, limits)
    assert isinstance(runner, PipelineRunner)
    return runner


def step(step_id: int, start: int, count: int, *, samples: bool = True, **more: Any) -> SchedulerOutput:
    """A step of row 0."""
    return SchedulerOutput(
        step_id=step_id,
        rows=[0],
        request_ids=["r"],
        num_computed_tokens=[start],
        num_scheduled_tokens=[count],
        samples=[samples],
        total_num_scheduled_tokens=count,
        **more,
    )


def request(tokens: Sequence[int], *blocks: int) -> NewRow:
    """A request that enters row 0."""
    return NewRow(
        row=0,
        request_id="r",
        token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        block_ids=(list(blocks),),
        sampling_params=SamplingParams(temperature=0),
        seed=0,
    )


def first_stage(steps: Sequence[SchedulerOutput], look: Callable[[PipelineRunner], object]) -> object:
    """What `look` finds at the first of two stages that have run some steps, of which nothing was told."""

    def run(group: Collectives) -> Any:
        runner = runner_of(group)
        try:
            for each in steps:
                runner.run(each)
            return look(runner) if group.rank == 0 else None
        finally:
            runner.close()

    return run_thread_ranks(2, run)[0]


def known(runner: PipelineRunner) -> list[int]:
    return list(runner.rows.history(0))


def test_tokens_go_behind_the_prompt() -> None:
    def look(runner: PipelineRunner) -> tuple[list[int], list[int]]:
        runner.take_sampled(1, [0], [[]])  # a chunk of a prompt
        before = known(runner)
        runner.take_sampled(2, [0], [[9]])
        return before, known(runner)

    steps = [step(1, 0, 2, samples=False, new_rows=[request([3, 4, 5], 1)]), step(2, 2, 1)]
    assert first_stage(steps, look) == ([3, 4, 5], [3, 4, 5, 9])


def test_tokens_of_a_request_that_has_gone_are_not_those_of_the_next_one_in_its_row() -> None:
    def look(runner: PipelineRunner) -> list[int]:
        runner.take_sampled(1, [0], [[9]])
        return known(runner)

    steps = [
        step(1, 0, 3, new_rows=[request([3, 4, 5], 1)]),
        step(2, 0, 6, freed_rows=[0], new_rows=[request([10, 11, 12, 13, 14, 15], 2, 3)]),
    ]
    assert first_stage(steps, look) == [10, 11, 12, 13, 14, 15]


def test_what_came_true_of_a_tree_is_put_into_one_line() -> None:
    """Of drafts 20, 21 and 22 behind the fourth token, 22 behind 21, come 21 and 22, and then 30."""

    def keys(runner: PipelineRunner) -> torch.Tensor:
        (cache,) = runner._layers.kv_caches
        return cache.clone()

    def look(runner: PipelineRunner) -> tuple[list[int], torch.Tensor]:
        runner.take_sampled(2, [0], [[21, 22, 30]])
        return known(runner), keys(runner)

    prompt = step(1, 0, 3, new_rows=[request([3, 4, 5, 6], 1, 2)], samples=False)
    tree = step(2, 3, 4, draft_token_ids={0: [20, 21, 22]}, draft_parents={0: [-1, -1, 1]})
    chain = step(2, 3, 3, draft_token_ids={0: [21, 22]})
    tokens, found = first_stage([prompt, tree], look)
    assert tokens == [3, 4, 5, 6, 21, 22, 30]
    (_, expected) = first_stage([prompt, chain], look)
    block = 2  # of places 4 to 7; in it are 4 and 5
    assert torch.equal(found[block, :, :, :2], expected[block, :, :, :2])
