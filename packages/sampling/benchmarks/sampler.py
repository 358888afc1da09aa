"""Time of one sampler call: `python packages/sampling/benchmarks/sampler.py [--threads 2] [--rows 32]`.

Logits are peaked like a trained model's (a few tokens hold most of the probability), or flat like a random one's.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from quire_interfaces import SamplingParams
from quire_sampling import Sampler, SamplingState

MIXES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 20": SamplingParams(temperature=0.8, top_k=20),
    "top_k 20, top_p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "penalties, greedy": SamplingParams(temperature=0, repetition_penalty=1.1, frequency_penalty=0.2),
    "greedy, logprobs 5": SamplingParams(temperature=0, logprobs=5),
}


def make_logits(kind: str, rows: int, vocab: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 2
    if kind == "peaked":
        logits[:, :: vocab // 40] += 12
    return logits


def measure(params: SamplingParams, logits: torch.Tensor, repeats: int) -> tuple[float, float]:
    rows, vocab = logits.shape
    state = SamplingState(rows, vocab)
    for row in range(rows):
        state.set_row(row, params, seed=row, num_prompt_tokens=100)
    sampler = Sampler(state)
    token_ids = torch.randint(0, vocab, (rows, 1024))
    positions = torch.full((rows,), 500)
    times = []
    for _ in range(repeats + 2):
        work = logits.clone()
        start = time.perf_counter()
        sampler.sample(work, list(range(rows)), positions, token_ids).token_ids.tolist()
        times.append(time.perf_counter() - start)
    return min(times[2:]) * 1e3, statistics.median(times[2:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.rows} rows x {args.vocab} tokens, {args.threads} threads: best and median of {args.repeats}, in ms")
    for name, params in MIXES.items():
        cells = []
        for kind in ("peaked", "flat"):
            best, median = measure(params, make_logits(kind, args.rows, args.vocab), args.repeats)
            cells.append(f"{kind} {best:7.2f} {median:7.2f}")
        print(f"{name:>22}  " + "   ".join(cells))


if __name__ == "__main__":
    main()
