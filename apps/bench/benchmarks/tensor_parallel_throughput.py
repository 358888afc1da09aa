"""Decode steps of tensor-parallel ranks with one thread each, against one process with as many threads.

    python apps/bench/benchmarks/tensor_parallel_throughput.py --ranks 2 --batch 1,8

Both engines are loaded from one random checkpoint, of the shape of Qwen3 0.6B unless another is named, and take turns:
in each round one generates while the other waits. The time of a step is that of 64 greedy tokens behind prompts whose
prefix is cached, without the first one. It ends if the two do not give the same tokens. `pipeline_throughput.py` does
that for stages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_PROMPT_TOKENS = 128


def work(model: str, axis: str, ranks: int, threads: int, dtype: str, quantization: str | None) -> None:
    """One engine: for each line [batch, tokens, temperature] on the standard input, seconds of a step and what came
    out."""
    from quire import LLM, SamplingParams

    settings: dict[str, Any] = {f"{axis}_parallel_size": ranks}
    if quantization is not None:
        settings["quantization"] = quantization
    llm = LLM(
        model,
        num_threads=threads,
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=32,
        num_gpu_blocks_override=2048,
        **settings,
    )
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        batch, num_tokens, temperature = json.loads(line)
        prompts = [
            {"prompt_token_ids": [10 + (7 * i + j) % 200 for j in range(NUM_PROMPT_TOKENS)]} for i in range(batch)
        ]
        seconds, outputs = [], []
        for count in (1, 1, num_tokens + 1):  # the first one fills the prefix cache
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=count, ignore_eos=True)
            start_s = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - start_s)
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps([(seconds[2] - seconds[1]) / num_tokens, token_ids]), flush=True)
    llm.close()


class Engine:
    """An engine in a process of its own."""

    def __init__(self, args: argparse.Namespace, model: str, axis: str, ranks: int, threads: int) -> None:
        own = [sys.executable, __file__, "--model", model, "--worker", f"{axis},{ranks},{threads}"]
        own += ["--dtype", args.dtype]
        own += ["--quantization", args.quantization] if args.quantization else []
        self._process = subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = f"{ranks} rank(s) with {threads} thread(s)"
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith(("[", '"ready"')):
                return json.loads(line)
        raise SystemExit(f"{self.name} ended with exit status {self._process.wait()}")

    def step_s(self, batch: int, num_tokens: int, temperature: float) -> tuple[float, list[list[int]]]:
        """Seconds of a decode step of so many requests, and their tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([batch, num_tokens, temperature]) + "\n")
        self._process.stdin.flush()
        seconds, token_ids = self._read()
        return seconds, token_ids

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(args: argparse.Namespace, model: str, axis: str) -> None:
    """Let both engines take turns, and print what they took."""
    engines = [Engine(args, model, axis, 1, args.ranks), Engine(args, model, axis, args.ranks, args.threads)]
    for batch in map(int, args.batch.split(",")):
        rounds: list[list[float]] = []
        for number in range(args.rounds + 1):  # the first one does not count
            order = engines if number % 2 else engines[::-1]
            found = {engine.name: engine.step_s(batch, args.tokens, args.temperature) for engine in order}
            (one_s, one_ids), (ranks_s, rank_ids) = (found[engine.name] for engine in engines)
            if one_ids != rank_ids:
                raise SystemExit(f"batch {batch}: the engines' tokens differ")
            if number:
                rounds.append([one_s, ranks_s])
        for i, engine in enumerate(engines):
            steps = [1e3 * each[i] for each in rounds]
            print(f"batch {batch}, {engine.name}: {statistics.median(steps):.2f} ms a step, {min(steps):.2f} at least")
        ratios = [one_s / ranks_s for one_s, ranks_s in rounds]
        print(
            f"batch {batch}: ranks decode {statistics.median(ratios):.3f} times as fast as one process (median of "
            f"{len(ratios)} rounds, {min(ratios):.3f} to {max(ratios):.3f}); the same tokens",
            flush=True,
        )
    for engine in engines:
        engine.close()
    print(f"load average: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


def main(axis: str = "tensor", description: str | None = __doc__, **defaults: Any) -> None:
    """Compare ranks of an axis ("tensor", "pipeline") with one process; `defaults` are those of the arguments."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: a random checkpoint of the shape of Qwen3 0.6B")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank; the one process has one for each rank")
    parser.add_argument("--batch", default="1,8", help="requests at a time, several with commas")
    parser.add_argument("--tokens", type=int, default=64, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", help="of weights while they are loaded: int8, int4, ...")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    if args.worker:
        axis, ranks, threads = args.worker.split(",")
        work(args.model, axis, int(ranks), int(threads), args.dtype, args.quantization)
    elif args.model:
        compare(args, args.model, axis)
    else:
        from quire_testkit.checkpoints import make_checkpoint

        with tempfile.TemporaryDirectory() as scratch:
            compare(args, str(make_checkpoint(Path(scratch) / "qwen3-0.6b", like="qwen3", size="0.6b")), axis)


if __name__ == "__main__":
    main()
