"""A runner whose steps are made of Triton kernels, by graphs or launched kernel by kernel.

With a GPU the graphs are CUDA's; without one launches of interpreted kernels are recorded and done again.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from kernels_cuda_support import DEVICE

from quire_interfaces import NewRow, SamplingParams, SchedulerOutput
from quire_kernels_cuda.ops import backends
from quire_kv_cache import plan_kv_cache
from quire_lora import Adapter, AdapterRuntime, AdapterStore
from quire_lora.adapter import LinearAdapter
from quire_models import ModelConfig, Network, build_model
from quire_ops import OpTable, builtin_table
from quire_runner import ModelRunner, RunnerConfig
from quire_testkit.recorded_graph import record_graph

BLOCK = 16
PROMPTS = ([5, 6, 7], list(range(11, 22)), [9])
NETWORK: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "use_sliding_window": True,
    "sliding_window": 11,
    "max_window_layers": 1,
    "tie_word_embeddings": True,
}


PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.2),
    SamplingParams(temperature=1.2, frequency_penalty=1.9, repetition_penalty=1.5),
)


def triton_table() -> OpTable:
    """Triton's kernels before all others, which they are not where they are interpreted."""
    table = builtin_table()
    for backend in backends():
        table.add(dataclasses.replace(backend, priority=10))
    return table


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op that networks and runners choose from now on."""
    table = triton_table()
    for place in (
        "quire_ops.backends",
        "quire_models.layers.scope",
        "quire_attention.backend",
        "quire_lora.slots",
        "quire_runner.runner",
    ):
        monkeypatch.setattr(f"{place}.op_table", lambda: table)


class Driver:
    """A runner whose requests never end. Layers that take the same input are joined without a GPU, too."""

    def __init__(
        self,
        network: dict[str, Any] = NETWORK,
        *,
        max_loras: int = 0,
        linear_method: str = "plain",
        join_products: bool = True,
        launches: list[str] | None = None,
        **config: Any,
    ) -> None:
        """Args:
        launches: Gets the names of what is launched in the graphs, without a GPU.
        """
        model = build_model(
            ModelConfig.from_dict(network),
            dtype="float32",
            device=DEVICE,
            linear_method=linear_method,
            max_loras=max_loras,
            max_lora_rank=4,
            join_products=join_products,
        )
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters:
            scale = parameter.shape[-1] ** -0.5 * 1.5 if len(parameter.shape) > 1 else 1.0
            parameter.tensor = (torch.randn(parameter.shape, generator=generator) * scale).to(DEVICE)
        model.finish_loading()
        assert not model.host_lengths
        self.plan = plan_kv_cache(model.config.kv_cache_specs(BLOCK, "float32"), num_blocks=32)
        config = {"device": DEVICE, "dtype": "float32", "max_num_seqs": 3, "max_model_len": 64, **config}
        config = {"cuda_graph_sizes": (2,), "cuda_graph_mixed_tokens": 0, **config}
        capture = None if DEVICE == "cuda" else partial(record_graph, launches=launches)
        self.slots = tuple(row % max_loras if max_loras and row else -1 for row in range(3))
        self.runner = ModelRunner.for_model(
            model, self.plan, RunnerConfig(**config), capture=capture, adapters=_placed(model, max_loras)
        )
        self.num_tokens: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {row: [] for row in range(3)}
        self._step = 0

    def step(self, rows: list[int]) -> None:
        """A prompt for each row that is new, one token for the others."""
        new = [row for row in rows if row not in self.num_tokens]
        counts = [len(PROMPTS[row]) if row in new else 1 for row in rows]
        output = SchedulerOutput(
            step_id=self._step,
            rows=rows,
            request_ids=[str(row) for row in rows],
            num_computed_tokens=[0 if row in new else self.num_tokens[row] - 1 for row in rows],
            num_scheduled_tokens=counts,
            samples=[True] * len(rows),
            total_num_scheduled_tokens=sum(counts),
            new_rows=[self._new(row) for row in new],
        )
        self._step += 1
        for row, tokens in zip(rows, self.runner.run(output).sampled_token_ids, strict=True):
            self.num_tokens[row] = self.num_tokens.get(row, len(PROMPTS[row])) + 1
            self.tokens[row] += tokens
        if self.runner.graphs is not None:
            self.runner.graphs.wait()

    def verify(self, drafts: dict[int, list[int]]) -> None:
        """Rows with drafts behind their last token, which are right as far as they are kept."""
        counts = [1 + len(ids) for ids in drafts.values()]
        output = SchedulerOutput(
            step_id=self._step,
            rows=list(drafts),
            request_ids=[str(row) for row in drafts],
            num_computed_tokens=[self.num_tokens[row] - 1 for row in drafts],
            num_scheduled_tokens=counts,
            samples=[True] * len(drafts),
            total_num_scheduled_tokens=sum(counts),
            draft_token_ids={row: ids for row, ids in drafts.items() if ids},
        )
        self._step += 1
        for row, tokens in zip(drafts, self.runner.run(output).sampled_token_ids, strict=True):
            self.num_tokens[row] += len(tokens)
            self.tokens[row] += tokens
        if self.runner.graphs is not None:
            self.runner.graphs.wait()

    def _new(self, row: int) -> NewRow:
        ids = list(range(1 + 4 * row, 5 + 4 * row))
        return NewRow(
            row=row,
            request_id=str(row),
            token_ids=PROMPTS[row],
            num_prompt_tokens=len(PROMPTS[row]),
            num_computed_tokens=0,
            block_ids=tuple([12 * group + block for block in ids] for group in range(len(self.plan.groups))),
            sampling_params=PARAMS[row],
            seed=row,
            stop_token_ids=frozenset(),
            adapter_slot=self.slots[row],
            adapter_version=str(self.slots[row]) if self.slots[row] >= 0 else "",
        )


def _placed(model: Network, max_loras: int) -> AdapterRuntime | None:
    """A random adapter in each slot."""
    if model.adapters is None:
        return None
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    for slot in range(max_loras):
        linears = {
            name: LinearAdapter(a=random(2 + slot, site.shape[1]), b=random(2 + slot, site.shape[0]))
            for name, site in model.adapters.linears.items()
        }
        model.adapters.place(slot, str(slot), Adapter(linears=linears))
    return AdapterRuntime(model.adapters, AdapterStore(model.adapters, model.parameter_tensors, max_adapters=1))
