"""A runner with requests of one length and random weights, driven without a scheduler: what `gpu_check.py` times."""

from __future__ import annotations

import statistics
import time
from typing import Any

__all__ = ["Engine"]


class _AllButOne:
    """A grammar, and where an output stands in it: any token but the first."""

    allows_all = is_terminated = False

    def new_matcher(self, params: Any) -> _AllButOne:
        return self

    def fill_bitmask(self, bitmask: memoryview) -> None:
        bitmask.cast("B")[:] = b"\xff" * bitmask.nbytes
        bitmask.cast("B")[0] = 0xFE

    def accept(self, token_id: int) -> bool:
        return token_id != 0

    def rollback(self, num_tokens: int) -> None:
        pass

    def forced_token_ids(self) -> list[int]:
        return []


class _OneAdapter:
    """Where the slot of an adapter is filled from: small random matrices for every layer that may have some."""

    def __init__(self, slots: Any) -> None:
        self._slots = slots

    def adapter(self, version: str) -> Any:
        import torch

        from quire_lora import Adapter
        from quire_lora.adapter import LinearAdapter

        linears = {}
        for name, site in self._slots.linears.items():
            outputs, inputs = site.shape
            a, b = (torch.randn(size) * 0.02 for size in ((16, inputs), (16, outputs)))
            linears[name] = LinearAdapter(a=a, b=b)
        return Adapter(linears=linears)


class Engine:
    """A runner with requests of one length, driven without a scheduler."""

    def __init__(
        self,
        shape: str,
        num_seqs: int,
        length: int,
        device: str,
        dtype: str,
        *,
        join_products: bool | None = None,
        sampling: dict[str, Any] | None = None,
        kv_cache_dtype: str | None = None,
        linear_method: str = "plain",
        has_adapter: bool = False,
        num_drafts: int = 0,
        max_step_tokens: int | None = None,
    ) -> None:
        """Args:
        sampling: Fields of every request's `SamplingParams`; None for greedy requests.
        kv_cache_dtype: Of keys and values; None for the network's own.
        linear_method: How weights are kept.
        has_adapter: Every request uses the same adapter, of rank 16, in all layers that may have one.
        num_drafts: Tokens that each decode verifies behind its last one, as the n-gram drafter and draft models propose
            them; here they are guesses, nearly all of which are wrong.
        max_step_tokens: None for a prompt's.
        """
        from quire_kv_cache import plan_kv_cache
        from quire_models import ModelConfig, build_model
        from quire_runner import ModelRunner, RunnerConfig
        from quire_testkit.checkpoints import checkpoint_config

        config = ModelConfig.from_dict(checkpoint_config("qwen3" if shape == "0.6b" else "llama", shape, dtype))
        self.network = build_model(
            config, dtype=dtype, device=device, join_products=join_products, linear_method=linear_method,
            kv_cache_dtype=kv_cache_dtype, block_size=16, max_loras=int(has_adapter),
        )  # fmt: skip
        _fill(self.network)
        adapters = None
        if self.network.adapters is not None:
            from quire_lora import AdapterRuntime

            adapters = AdapterRuntime(self.network.adapters, _OneAdapter(self.network.adapters))
        self.linear_method, self.has_adapter = linear_method, has_adapter
        self.num_seqs, self.length, self.block = num_seqs, length, 16
        self.sampling, self.num_drafts = sampling or {"temperature": 0}, num_drafts
        self.width = -(-(length + 256) // self.block)
        specs = config.kv_cache_specs(self.block, kv_cache_dtype or dtype)
        self.token_bytes = sum(spec.block_bytes for spec in specs.values()) / self.block
        plan = plan_kv_cache(specs, num_blocks=1 + num_seqs * self.width)
        self.num_groups = len(plan.groups)
        settings = {
            "max_num_seqs": num_seqs,
            "max_model_len": length + 256,
            "max_num_batched_tokens": max_step_tokens or length,
            "num_speculative_tokens": num_drafts,
            "cuda_graph_sizes": (num_seqs * (1 + num_drafts),),
        }
        self.runner = ModelRunner.for_model(
            self.network, plan, RunnerConfig(device=device, dtype=dtype, **settings),
            grammars=_AllButOne(), adapters=adapters,
        )  # fmt: skip
        self.runner.warm_up(capture_s=30.0)
        self.config, self._step = config, 0

    def step(
        self,
        rows: list[int],
        starts: list[int],
        counts: list[int],
        *,
        new: bool = False,
        samples: Any = None,
        drafts: dict[int, list[int]] | None = None,
    ) -> Any:
        """Launch a step; what it returns waits for it, and gives the tokens of each row. samples: Which rows do; None
        for all. drafts: Row -> its last tokens of the step, to be verified."""
        from quire_interfaces import SchedulerOutput

        self._step += 1
        read = self.runner.launch(
            SchedulerOutput(
                step_id=self._step,
                rows=rows,
                request_ids=[str(row) for row in rows],
                num_computed_tokens=starts,
                num_scheduled_tokens=counts,
                samples=samples or [True] * len(rows),
                total_num_scheduled_tokens=sum(counts),
                new_rows=[self._new(row) for row in rows] if new else [],
                draft_token_ids=drafts or {},
            )
        )

        def finished() -> list[list[int]]:
            result = read()
            if result.failed_rows:
                raise RuntimeError(f"rows failed: {result.failed_rows}")
            tokens: list[list[int]] = result.sampled_token_ids
            return tokens

        return finished

    def _new(self, row: int) -> Any:
        from quire_interfaces import NewRow, SamplingParams

        first = 1 + row * self.width
        ids = list(range(first, first + self.width))
        return NewRow(
            row=row, request_id=str(row), token_ids=[7 + (row + i) % 200 for i in range(self.length)],
            num_prompt_tokens=self.length, num_computed_tokens=0, block_ids=(ids,) * self.num_groups,
            sampling_params=SamplingParams(**self.sampling), seed=row, stop_token_ids=frozenset(),
            adapter_slot=0 if self.has_adapter else -1, adapter_version="one" if self.has_adapter else "",
        )  # fmt: skip

    def prefill_s(self) -> float:
        """Seconds of a step with a whole prompt, its result included."""
        start = time.perf_counter()
        self.step([0], [0], [self.length], new=True)()
        return time.perf_counter() - start

    def decode_s(self, num_steps: int) -> tuple[float, float]:
        """Seconds of a decode step of all rows, the median of five runs, launched one ahead of what is read (with
        drafts, when it has been read where they end); and how long launching one takes the host."""
        rows, samples, host = list(range(self.num_seqs)), [], 0.0
        for row in rows:
            self.step([row], [0], [self.length], new=True)()
        positions = [self.length] * self.num_seqs
        for timed in (False, True, True, True, True, True):
            count = num_steps if timed else 8
            start, before = time.perf_counter(), None
            for _ in range(count):
                begin = time.perf_counter()
                read = self.step(rows, positions, [1 + self.num_drafts] * self.num_seqs, drafts=self._drafts(rows))
                host += (time.perf_counter() - begin) * timed
                if self.num_drafts or not timed:
                    positions = [place + len(tokens) for place, tokens in zip(positions, read(), strict=True)]
                    if not timed and self.runner.graphs is not None:
                        self.runner.graphs.wait()
                    continue
                positions = [place + 1 for place in positions]
                if before is not None:
                    before()
                before = read
            if before is not None:
                before()
            samples += [(time.perf_counter() - start) / count] * timed
        return statistics.median(samples), host / (5 * num_steps)

    def _drafts(self, rows: list[int]) -> dict[int, list[int]]:
        guesses = [(self._step * self.num_drafts + i) % self.config.vocab_size for i in range(self.num_drafts)]
        return dict.fromkeys(rows, guesses) if self.num_drafts else {}

    def mixed_s(self, num_tokens: int) -> float:
        """Seconds of a step in which one row reads so many tokens of its prompt and all others decode: the median of
        some, each launched one ahead of what is read."""
        rows, samples = list(range(self.num_seqs)), []
        for row in rows:
            self.step([row], [0], [self.length], new=True)()
        counts = [num_tokens] + [1] * (self.num_seqs - 1)
        before = None
        start = time.perf_counter()
        for i in range(24):
            starts = [0] + [self.length + i] * (self.num_seqs - 1)
            read = self.step(rows, starts, counts, samples=[False] + [True] * (self.num_seqs - 1))
            if before is not None:
                before()
                now = time.perf_counter()
                samples.append(now - start)
                start = now
            before = read
        if before is not None:
            before()
        return statistics.median(samples[8:])

    def add_decode(self, results: Any, part: str, what: str, read_bytes_per_s: float, bar: float) -> None:
        """Time decode steps of all rows, beside what reading the weights, keys and values takes."""
        seconds, host_s = self.decode_s(32)
        tokens = self.num_seqs * (self.length + 16 + 5 * 16)
        limit_s = (self.weight_bytes() + self.kv_bytes(tokens)) / read_bytes_per_s
        results.measured(
            part, what, seconds, limit_s, bar,
            tokens_per_s=self.num_seqs / seconds, host_ms=host_s * 1e3, attention=self.network.attention_backend.name,
            graphs=self.graphs(),
        )  # fmt: skip

    def graphs(self) -> Any:
        """Number of captured graphs, or why there are none."""
        graphs = self.runner.graphs
        return self.runner.graph_refusal if graphs is None else (graphs.failure or len(graphs.captured))

    def weight_bytes(self) -> int:
        """Of the layers and the LM head: what a decode step has to read."""
        from quire_models.ledger import weight_ledger

        ledger = weight_ledger(self.config, str(self.network.dtype).removeprefix("torch."), self.linear_method)
        embedding = self.config.vocab_size * self.config.hidden_size * self.network.dtype.itemsize
        return sum(ledger.values()) - (0 if self.config.tie_word_embeddings else embedding)

    def kv_bytes(self, num_tokens: int) -> float:
        return self.token_bytes * num_tokens

    def close(self) -> None:
        self.runner.close()


def _fill(network: Any) -> None:
    """Random weights, made where they stay: the host takes a minute for those of an 8B network."""
    import torch

    generator = torch.Generator(network.device).manual_seed(0)
    for parameter in network.parameters:
        dtype = parameter.dtype or network.dtype
        memory = parameter.memory(dtype, network.device)
        tensor = torch.empty(parameter.shape, dtype=dtype, device=network.device) if memory is None else memory
        is_norm = len(parameter.shape) < 2
        parameter.tensor = tensor.fill_(1.0) if is_norm else tensor.normal_(0.0, 0.02, generator=generator)
    network.finish_loading()
