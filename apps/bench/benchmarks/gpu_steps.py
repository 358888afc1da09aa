"""Parts "steps" and "draws" of `gpu_check.py`: decode steps of every kind beside their limits, and draws alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from gpu_engine import Engine

__all__ = ["DRAWS", "STEPS", "run_draws", "run_steps"]

STEPS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "a penalty": {"sampling": {"temperature": 0, "presence_penalty": 0.5}},
    "a bias and a forbidden word": {
        "sampling": {"temperature": 0, "logit_bias": {5: 1.0, 6: -1.0}, "bad_words_token_ids": ((7, 8),)}
    },
    "a grammar": {"sampling": {"temperature": 0, "structured_outputs": "[a-z]*"}},
    "an adapter": {"has_adapter": True},
    "3 drafts verified": {"num_drafts": 3},
    "KV cache in int8": {"kv_cache_dtype": "int8"},
    "KV cache in fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "KV cache in int4": {"kv_cache_dtype": "int4"},
    "weights in int4": {"linear_method": "int4"},
    "weights in int8": {"linear_method": "int8"},
    "weights in fp8": {"linear_method": "fp8"},
    "weights in w8a8": {"linear_method": "w8a8"},
}
"""Kinds of decode steps, and how their engines differ from greedy requests of a bfloat16 network."""
MIXED_TOKENS = 512
"""Of a prompt, in a step with decodes."""
DRAWS: dict[str, tuple[float, int, float]] = {
    "temperature": (0.7, 0, 1.0),
    "top_k": (0.7, 20, 1.0),
    "top_p": (0.7, 0, 0.95),
    "top_k and top_p": (0.7, 20, 0.95),
    "top_p of nearly all": (1.0, 0, 0.999),
}
"""Temperature, top_k (0 for none) and top_p of draws."""
DRAW_LIMIT_S = 50e-6
"""What a draw of 64 rows of 151,936 logits may take."""


def run_steps(
    results: Any,
    device: str,
    decodes: Any,
    dtype: str,
    reported: Callable[..., AbstractContextManager[None]],
    only: Callable[[str], bool],
) -> None:
    """Decode steps of every kind, each beside what reading weights, keys and values once takes, and beside greedy ones
    of the same requests; and steps in which a piece of a prompt is read beside decodes.

    Args:
        decodes: Shape, requests, context, and the kinds of steps; empty for all.
        only: Whether a figure of this name is asked for.
    """
    import torch

    from quire_bench.kernels import measure_limits

    rates = measure_limits(torch.device(device), getattr(torch, dtype))
    for shape, num_seqs, length, kinds in decodes:
        for kind, settings in STEPS.items():
            name = f"decode {shape} batch {num_seqs} context {length}, {kind}"
            if (kinds and kind not in kinds) or not only(name):
                continue
            with reported(results, "steps", name):
                engine = Engine(shape, num_seqs, length, device, dtype, **_made(settings))
                engine.add_decode(results, "steps", name, rates.read_bytes_per_s, 0.0)
                engine.close()
                del engine
        name = f"mixed {shape} batch {num_seqs} context {length}, {MIXED_TOKENS} of a prompt"
        if num_seqs > 1 and only(name):
            with reported(results, "steps", name):
                count = min(MIXED_TOKENS, length)
                engine = Engine(shape, num_seqs, length, device, dtype, max_step_tokens=max(length, count + num_seqs))
                seconds = engine.mixed_s(count)
                flop = engine.weight_bytes() // engine.network.dtype.itemsize * 2 * (count + num_seqs)
                limit_s = engine.weight_bytes() + engine.kv_bytes(num_seqs * length)
                limit_s = max(limit_s / rates.read_bytes_per_s, flop / rates.matmul_flop_per_s)
                results.measured("steps", name, seconds, limit_s, 0.0)
                engine.close()
                del engine


def _made(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with a grammar's pattern as a request has it."""
    from quire_interfaces import StructuredOutputsParams

    sampling = dict(settings.get("sampling") or {"temperature": 0})
    if pattern := sampling.get("structured_outputs"):
        sampling["structured_outputs"] = StructuredOutputsParams(regex=pattern)
    return {**settings, "sampling": sampling}


def _logits(num_rows: int, vocab_size: int, device: str) -> Iterator[tuple[str, Any]]:
    """Logits of a network with random weights; and some as trained ones give: a few likely tokens, a long tail."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    flat = torch.randn(num_rows, vocab_size, device=device, generator=generator) * 0.64
    yield "flat", flat
    ranks = torch.argsort(torch.rand(num_rows, vocab_size, device=device, generator=generator), dim=-1) + 1.0
    yield "peaked", ranks.log().mul_(-1.3) + flat


def run_draws(
    results: Any, device: str, sizes: Any, reported: Callable[..., AbstractContextManager[None]], seconds_of: Any
) -> None:
    """Op `sample` alone, as steps launch it, each beside the time that reading the logits takes; and whether some of
    its tokens are those of the reference.

    Args:
        sizes: Rows, and tokens of the vocabulary.
        seconds_of: Calls of equal work, a device and a number -> so many times the seconds of one call.
    """
    import torch

    from quire_bench.kernels import measure_limits
    from quire_ops import OpRequest, SampleTable, op_table
    from quire_ops.ops import op_named

    rates = measure_limits(torch.device(device), torch.float32)
    reference = op_named("sample")
    request = OpRequest(device=torch.device(device).type, dtype=torch.float32)
    backends = [
        one for one in op_table().backends(reference) if one.name != "reference" and one.refusal(request) is None
    ]
    for num_rows, vocab_size in sizes:
        for what, logits in _logits(num_rows, vocab_size, device):
            copies = [logits.clone() for _ in range(4)]
            rows = torch.arange(num_rows, device=device)
            for kind, (temperature, top_k, top_p) in DRAWS.items():
                table = SampleTable.greedy(num_rows, vocab_size, device)
                table.do_sample.fill_(True)
                table.seeds.copy_(rows)
                table.inv_temperature.fill_(math.log2(math.e) / temperature)
                table.top_k.fill_(top_k or vocab_size)
                table.top_p.fill_(top_p)
                for backend in backends:
                    name = f"sample {what} {num_rows} x {vocab_size}, {kind}"
                    with reported(results, "draws", name):
                        tokens = backend.function(logits, rows, rows, table)[0]
                        few = min(4, num_rows)
                        on_host = [each[:few].cpu() for each in (logits, rows, rows)]
                        host = SampleTable(**{key: getattr(table, key).cpu() for key in SampleTable.__slots__})
                        right = torch.equal(reference(*on_host, host)[0], tokens[:few].cpu())
                        calls = [_call(backend.function, each, rows, table) for each in copies]
                        seconds = statistics.median(seconds_of(calls, torch.device(device), 5))
                        is_held = backend.name == "triton" and vocab_size > 100_000
                        passes = right and (not is_held or seconds <= DRAW_LIMIT_S)
                        limit_s = logits.nbytes / rates.read_bytes_per_s
                        results.add(
                            "draws", name, backend=backend.name, median_us=seconds * 1e6, limit_us=limit_s * 1e6,
                            right=right, passes=passes,
                        )  # fmt: skip


def _call(function: Any, logits: Any, rows: Any, table: Any) -> Callable[[], Any]:
    return lambda: function(logits, rows, rows, table)
