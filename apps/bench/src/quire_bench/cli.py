"""Subcommands that this package adds to `quire`: `bench throughput|latency|serve` and `make-model`.

Only argparse is imported until a command runs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

__all__ = ["register_bench", "register_make_model"]


def register_bench(commands: Any) -> None:
    """Add `bench` to an argparse subparsers object; parsed arguments get `run`, a function of them."""
    parser = commands.add_parser("bench", help="measure throughput, latency or a running server")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="throughput|latency|serve")
    throughput = kinds.add_parser("throughput", help="offline: all requests at once")
    latency = kinds.add_parser("latency", help="offline: one batch, many times")
    serve = kinds.add_parser("serve", help="over HTTP, against any OpenAI-compatible server")
    for kind, requests in ((throughput, 32), (latency, 1), (serve, 64)):
        _add_workload(kind, requests)
    for kind in (throughput, latency):
        kind.add_argument("model", nargs="?", help="checkpoint folder or hub name (default: the demo model)")
        kind.add_argument("--dtype", default="auto")
        kind.add_argument("--quantization", default=None)
        kind.add_argument("--num-threads", type=int, default=None)
        kind.add_argument("--max-num-seqs", type=int, default=256)
        kind.add_argument("--repeats", type=int, default=3)
    throughput.add_argument("--peer", help="measure another engine in the same run, alternating: transformers")
    throughput.add_argument("--peer-batch-size", type=int, default=32)
    latency.add_argument("--warmups", type=int, default=1)
    throughput.set_defaults(run=run_throughput)
    latency.set_defaults(run=run_latency)
    _add_serve(serve)


def _add_workload(parser: argparse.ArgumentParser, num_requests: int) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--num-prompts", type=int, default=num_requests, help="number of requests")
    group.add_argument("--input-len", type=int, default=128, help="prompt tokens")
    group.add_argument("--output-len", type=int, default=128, help="generated tokens, exactly")
    group.add_argument("--length-spread", type=float, default=0.0, help="0.5 draws lengths from 50 %% to 150 %%")
    group.add_argument("--prefix-len", type=int, default=0, help="tokens shared by all prompts")
    group.add_argument("--token-range", default="10:250", help="LOW:HIGH of the random token ids (default 10:250)")
    group.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-json", metavar="FILE", help='write the figures as JSON; "-" for standard output')


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="model name to ask for (default: the server's first)")
    parser.add_argument("--max-concurrency", type=int, default=16)
    parser.add_argument("--request-rate", type=float, help="requests per second, Poisson (default: no pause)")
    parser.add_argument("--timeout", type=float, default=600.0, help="bound on the whole run, seconds")
    parser.add_argument("--api-key")
    parser.set_defaults(run=run_bench_serve)


def _requests(args: argparse.Namespace) -> list[Any]:
    from quire_interfaces import ConfigError

    from quire_bench.workload import Workload, random_requests

    try:
        low, high = (int(part) for part in args.token_range.split(":"))
    except ValueError:
        raise ConfigError(f"--token-range expects LOW:HIGH, got {args.token_range!r}", field="token_range") from None
    workload = Workload(
        num_requests=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        length_spread=args.length_spread,
        prefix_len=args.prefix_len,
        seed=args.seed,
    )
    return random_requests(workload, low=low, high=high)


def _load(args: argparse.Namespace, requests: list[Any]) -> Any:
    from quire import LLM
    from quire_demo_model import checkpoint_path

    longest = max(len(request.prompt_token_ids) + request.output_len for request in requests)
    return LLM(
        args.model or str(checkpoint_path()),
        dtype=args.dtype,
        quantization=args.quantization,
        num_threads=args.num_threads,
        max_num_seqs=args.max_num_seqs,
        max_model_len=longest,
        enable_prefix_caching=True,
    )


def run_throughput(args: argparse.Namespace) -> int:
    """`quire bench throughput`; with --peer, both engines in turn and the ratio of each pair."""
    from rich.progress import Progress

    from quire_bench.offline import measure_throughput
    from quire_bench.report import percentiles, print_report, write_json

    requests = _requests(args)
    llm = _load(args, requests)
    with Progress(transient=True) as progress:
        if args.peer is None:
            figures = measure_throughput(llm, requests, repeats=args.repeats, progress=progress)
        else:
            peer = _peer(args, llm)
            ours, theirs, task = [], [], progress.add_task("pairs", total=args.repeats)
            for _ in range(args.repeats):
                figures = measure_throughput(llm, requests, repeats=1, progress=progress)
                ours.append(figures["output_tokens_per_s"])
                seconds, tokens = peer.run(requests)
                theirs.append(tokens / seconds)
                progress.advance(task)
            figures["output_tokens_per_s"] = percentiles(ours)["p50"]
            figures[f"{args.peer}_output_tokens_per_s"] = percentiles(theirs)["p50"]
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            figures["ratio"] = percentiles(ratios)["p50"]
            figures["ratios"] = [round(ratio, 3) for ratio in ratios]
    llm.close()
    print_report("throughput", figures)
    write_json(args.output_json, figures)
    return 0


def _peer(args: argparse.Namespace, llm: Any) -> Any:
    from quire_bench.peers import load_peer

    return load_peer(
        args.peer,
        llm.model_folder,
        dtype=llm.dtype,
        num_threads=args.num_threads,
        batch_size=args.peer_batch_size,
    )


def run_latency(args: argparse.Namespace) -> int:
    """`quire bench latency`."""
    from rich.progress import Progress

    from quire_bench.offline import measure_latency
    from quire_bench.report import print_report, write_json

    requests = _requests(args)
    llm = _load(args, requests)
    with Progress(transient=True) as progress:
        figures = measure_latency(llm, requests, repeats=args.repeats, warmups=args.warmups, progress=progress)
    llm.close()
    print_report("latency", figures)
    write_json(args.output_json, figures)
    return 0


def run_bench_serve(args: argparse.Namespace) -> int:
    """`quire bench serve`; exit status 1 when a request failed."""
    import asyncio

    from rich.progress import Progress

    from quire_bench.report import print_report, write_json
    from quire_bench.serve import ServeLoad, run_serve, summarize

    load = ServeLoad(
        base_url=args.base_url.rstrip("/"),
        model=args.model,
        max_concurrency=args.max_concurrency,
        request_rate=args.request_rate,
        timeout_s=args.timeout,
        api_key=args.api_key,
        seed=args.seed,
    )
    requests = _requests(args)
    with Progress(transient=True) as progress:
        start = time.perf_counter()
        timings = asyncio.run(run_serve(load, requests, progress))
        figures = summarize(timings, time.perf_counter() - start)
    print_report(f"serve {load.base_url}", figures)
    write_json(args.output_json, figures)
    return 1 if figures["num_failed"] else 0


def register_make_model(commands: Any) -> None:
    """Add `make-model` to an argparse subparsers object."""
    parser = commands.add_parser("make-model", help="write a random checkpoint with a real tokenizer, offline")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--like", default="llama", help="family: llama, mistral, qwen2, qwen3")
    parser.add_argument("--size", default="tiny", help="shape: tiny, 60m, 0.6b, 1b, 8b")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-shard-size", type=int, default=2 << 30, help="bytes per file")
    parser.set_defaults(run=run_make_model)


def run_make_model(args: argparse.Namespace) -> int:
    """`quire make-model`."""
    from quire_testkit.checkpoints import make_checkpoint
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        task = progress.add_task("weights", total=None)
        folder = make_checkpoint(
            args.folder,
            like=args.like,
            size=args.size,
            dtype=args.dtype,
            seed=args.seed,
            max_shard_bytes=args.max_shard_size,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    print(f"wrote {args.like} {args.size} ({args.dtype}) to {folder}")
    return 0
