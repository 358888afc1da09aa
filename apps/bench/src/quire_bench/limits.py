"""What a machine and a model allow at best: measured rates, counted bytes and operations. No engine is asked.

A step reads every weight once and each request's keys and values once (memory), and multiplies every weight with every
token (processor); it cannot be faster than the slower of the two. What overlaps badly in practice is not in here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import selectors
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from quire_bench.peer_process import peer_environment, start_program
from quire_interfaces import QuireError
from quire_models.config import ModelConfig
from quire_models.config_fields import DTYPE_BYTES
from quire_models.ledger import weight_ledger

__all__ = ["MachineLimits", "MachineProbe", "ModelWork"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """Rates of a device at its best, as `quire_bench.kernels.measure_limits` measures them."""

    read_bytes_per_s: float
    matmul_flop_per_s: float

    @classmethod
    def median(cls, all_of_them: list[MachineLimits]) -> MachineLimits:
        """The median of each rate."""
        return cls(
            read_bytes_per_s=median(each.read_bytes_per_s for each in all_of_them),
            matmul_flop_per_s=median(each.matmul_flop_per_s for each in all_of_them),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Bytes and operations of a model's steps.

    Attributes:
        weight_bytes: Read in each step: all weights, but of an embedding without a tied LM head only what is looked up.
        layer_parameters: Weights of the layers; each token is multiplied with all of them.
        head_parameters: Weights of the LM head; each token that is sampled from is multiplied with them.
        kv_bytes_per_token: Keys and values of one token in all layers.
        attention_flop: Operations per pair of tokens of which one attends to the other, in all layers.
    """

    weight_bytes: int
    layer_parameters: int
    head_parameters: int
    kv_bytes_per_token: int
    attention_flop: int

    @classmethod
    def of(cls, model: ModelConfig, dtype: str, quantization: str | None = None) -> ModelWork:
        """From config.json; `quantization` is the linear method that stores the weights."""
        ledger = weight_ledger(model, dtype, quantization or "plain")
        if ledger["LM head"]:  # then it is not the embedding itself
            del ledger["embedding"]
        plain = weight_ledger(dataclasses.replace(model, quantization=None), "float32")
        element = DTYPE_BYTES[dtype]
        return cls(
            weight_bytes=sum(ledger.values()),
            layer_parameters=(plain["attention"] + plain["MLP"]) // 4,
            head_parameters=model.vocab_size * model.hidden_size,
            kv_bytes_per_token=2 * model.num_layers * model.kv_size * element,
            attention_flop=4 * model.num_layers * model.query_size,
        )

    def prefill_s(self, machine: MachineLimits, num_requests: int, num_tokens: int) -> float:
        """Least time for prompts of `num_tokens` tokens each."""
        flop = 2 * num_requests * (num_tokens * self.layer_parameters + self.head_parameters)
        flop += num_requests * self.attention_flop * num_tokens * (num_tokens + 1) // 2
        return max(flop / machine.matmul_flop_per_s, self.weight_bytes / machine.read_bytes_per_s)

    def step_s(self, machine: MachineLimits, num_requests: int, context_len: float) -> float:
        """Least time for one more token of each request when it has `context_len` tokens."""
        read = self.weight_bytes + num_requests * context_len * self.kv_bytes_per_token
        flop = 2 * num_requests * (self.layer_parameters + self.head_parameters)
        return max(read / machine.read_bytes_per_s, flop / machine.matmul_flop_per_s)


class MachineProbe:
    """Measures the machine, in a process that sleeps otherwise. Use it as a context manager, or call `close`.

    Args:
        dtype: Of the products.
        num_threads: Of the processor; None for all.
        timeout_s: Bound on each measurement.

    Attributes:
        limits: As measured at the start.

    Raises:
        QuireError: it failed or took too long.
    """

    def __init__(self, dtype: str, num_threads: int | None, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process = start_program(
            [sys.executable, "-m", "quire_bench.limits_program"],
            env=peer_environment(num_threads),
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
        )
        try:
            self.limits = MachineLimits(**self._ask({"dtype": dtype, "num_threads": num_threads}))
        except BaseException:
            self.close()
            raise

    def sample(self, rate: str) -> float:
        """The rate as it is now, within milliseconds.

        Args:
            rate: "read" for bytes per second of memory, "multiply" for operations per second of matrix products.

        Raises:
            QuireError: it failed or took too long.
        """
        return float(self._ask(rate))

    def _ask(self, message: Any) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        waiting = selectors.DefaultSelector()
        with waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            if not waiting.select(self._timeout_s):
                raise QuireError(f"measuring the machine's limits took longer than {self._timeout_s:g} s (--timeout)")
        line = process.stdout.readline()
        if not line:
            errors = process.stderr.read().decode(errors="replace").strip()[-500:]
            raise QuireError(f"measuring the machine's limits failed: {errors}")
        return json.loads(line)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> MachineProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def file_bytes(path: str) -> int:
    """Size of a converted model: a file, or the weights (.bin) of a folder."""
    root = Path(path)
    return root.stat().st_size if root.is_file() else sum(part.stat().st_size for part in root.glob("*model*.bin"))
