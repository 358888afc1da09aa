"""Subcommands that this package adds to `quire`: `bench` with its kinds, and `make-model`.

Only argparse is imported until a command runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from quire_bench.serving_flags import add_dataset_flags, add_load_flags, add_result_flags

__all__ = ["register_bench", "register_make_model"]

PEER_NAMES = [
    "transformers", "sentence-transformers", "onnxruntime", "vllm", "llama.cpp", "llama-server", "openvino",
    "faster-whisper", "whisper.cpp",
]  # fmt: skip
"""As in `quire_bench.peers`, which is not imported to register a command (a test holds the two together)."""


def register_bench(commands: Any) -> None:
    """Add `bench` to an argparse subparsers object; parsed arguments get `run`, a function of them."""
    parser = commands.add_parser("bench", help="measure throughput, latency or a running server")
    kinds = parser.add_subparsers(
        dest="kind", required=True, metavar="throughput|latency|embed|speech|serve|sweep|startup|peers|kernels"
    )
    throughput = kinds.add_parser("throughput", help="offline: all requests at once")
    latency = kinds.add_parser("latency", help="offline: one batch, many times")
    serve = kinds.add_parser("serve", help="over HTTP, against any OpenAI-compatible server")
    for kind, requests in ((throughput, 32), (latency, 1), (serve, 64)):
        _add_workload(kind, requests)
    for kind in (throughput, latency):
        _add_engine(kind)
    throughput.add_argument(
        "--peer", choices=PEER_NAMES, help="measure another engine in the same run, in turn, and print the ratio"
    )
    throughput.add_argument("--peer-batch-size", type=int, default=32, help="requests the peer runs at once")
    _add_peer_places(throughput)
    latency.add_argument("--warmups", type=int, default=1, help="runs before those that count")
    throughput.set_defaults(run=run_throughput)
    latency.set_defaults(run=run_latency)
    _add_embed(kinds.add_parser("embed", help="texts per second and the time of one, offline or of a server"))
    _add_speech(kinds.add_parser("speech", help="recordings to a server that transcribes, several at a time"))
    _add_serve(serve)
    _add_sweep(kinds.add_parser("sweep", help="a server under several loads, the largest that keeps to limits, plots"))
    _add_startup(
        kinds.add_parser("startup", help="from a command to a server that answers, with empty caches and again")
    )
    _add_kernels(kinds.add_parser("kernels", help="each backend of an op, beside what the machine allows"))
    _add_peers(kinds.add_parser("peers", help="beside every other engine that is installed, in turn"))


def _add_workload(parser: argparse.ArgumentParser, num_requests: int) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--num-prompts", type=int, default=num_requests, help=f"requests (default {num_requests})")
    group.add_argument(
        "--input-len", "--random-input-len", type=int, default=128, help="prompt tokens, exactly (default 128)"
    )
    group.add_argument(
        "--output-len", "--random-output-len", type=int, default=128, help="generated tokens, exactly (default 128)"
    )
    group.add_argument(
        "--length-spread",
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="0.5 draws lengths from 50 %% to 150 %%",
    )
    group.add_argument(
        "--prefix-len", "--random-prefix-len", type=int, default=0, help="tokens at the head that all prompts share"
    )
    group.add_argument(
        "--token-range",
        default="10:250",
        metavar="LOW:HIGH",
        help="random token ids from LOW to HIGH - 1 (default 10:250, which every vocabulary has)",
    )
    group.add_argument("--seed", type=int, default=0, help="same seed, same requests")
    parser.add_argument("--output-json", metavar="FILE", help='write the figures as JSON; "-" for standard output')


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="checkpoint folder or hub name (default: the demo model)")
    parser.add_argument("--dtype", default="auto", help="float32, float16, bfloat16 (default: the checkpoint's)")
    parser.add_argument("--quantization", help="how weights are stored, for example int8")
    parser.add_argument("--num-threads", type=int, help="of the processor")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="requests the engine runs at once")
    parser.add_argument("--repeats", type=int, default=3, help="runs that count (default 3)")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_dataset_flags(parser)
    add_load_flags(parser)
    add_result_flags(parser)
    group = parser.add_argument_group("vLLM's result file")
    group.add_argument("--save-result", action="store_true", help="write figures under vLLM's names, as JSON")
    group.add_argument("--save-detailed", action="store_true", help="with those of each request")
    group.add_argument("--result-dir", metavar="FOLDER", help="(default: here)")
    group.add_argument("--result-filename", metavar="NAME", help="(default: LABEL-RATEqps-TIME.json)")
    parser.set_defaults(run=run_bench_serve)


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    sweeps = parser.add_subparsers(dest="sweep", required=True, metavar="serve|serve-sla|plot-pareto")
    serve = sweeps.add_parser("serve", help="measure each rate with each concurrency")
    sla = sweeps.add_parser("serve-sla", aliases=["serve_sla"], help="find the largest load that keeps to limits")
    for each in (serve, sla):
        _add_workload(each, 64)
        add_dataset_flags(each)
        add_load_flags(each)
        add_result_flags(each)
        outputs = each.add_argument_group("files")
        outputs.add_argument("--csv", metavar="FILE", help="a line for each run, under vLLM's names")
        outputs.add_argument("--svg", metavar="FILE", help="throughput of each user against that of all")
        outputs.add_argument("--html", metavar="FILE", help="the same with a table, in one file")
    serve.add_argument("--request-rates", metavar="NUMBER,...", help="requests per second, e.g. 1,2,4,inf")
    serve.add_argument("--max-concurrencies", metavar="NUMBER,...", help="requests in flight, e.g. 1,4,16")
    serve.add_argument("--num-runs", type=int, default=1, metavar="N", help="of each load (default 1)")
    serve.set_defaults(run=run_sweep_serve)
    sla.add_argument(
        "--sla", nargs="+", default=[], metavar="FIGURE=MS", help="limits, e.g. p99_ttft_ms=200 p99_itl_ms=50"
    )
    sla.add_argument(
        "--variable", choices=("request-rate", "max-concurrency"), default="request-rate", help="(default request-rate)"
    )
    sla.add_argument("--min", type=float, default=1.0, metavar="LOAD", help="first load (default 1)")
    sla.add_argument("--max", type=float, default=256.0, metavar="LOAD", help="largest load (default 256)")
    sla.add_argument("--tolerance", type=float, default=0.05, metavar="SHARE", help="of a rate (default 0.05)")
    sla.set_defaults(run=run_sweep_sla)
    plot = sweeps.add_parser("plot-pareto", aliases=["plot_pareto"], help="draw runs that were measured")
    plot.add_argument("files", nargs="+", metavar="FILE", help="CSV or JSON of sweeps, or results of bench serve")
    plot.add_argument("--svg", metavar="FILE")
    plot.add_argument("--html", metavar="FILE")
    plot.set_defaults(run=run_plot_pareto)


def _add_speech(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="WAV files, sent in turn")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument("--model", help="model to ask for (default: the server's)")
    parser.add_argument("--num-prompts", type=int, default=16, help="requests (default 16)")
    parser.add_argument("--max-concurrency", type=int, default=8, help="requests in flight (default 8)")
    parser.add_argument("--language", metavar="CODE", help="spoken language (default: it is heard)")
    parser.add_argument("--timeout", type=float, default=600.0, help="bound on each request, seconds (default 600)")
    parser.add_argument("--api-key", help="default: OPENAI_API_KEY of the environment")
    parser.add_argument("--output-json", metavar="FILE", help='write the figures as JSON; "-" for standard output')
    parser.set_defaults(run=run_speech)


def run_speech(args: argparse.Namespace) -> int:
    """`quire bench speech`."""
    from quire_bench import speech
    from quire_bench.report import check_json_path, show

    check_json_path(args.output_json)
    load = speech.SpeechLoad(
        files=args.files,
        base_url=args.base_url,
        model=args.model,
        num_requests=args.num_prompts,
        max_concurrency=args.max_concurrency,
        language=args.language,
        timeout_s=args.timeout,
        api_key=args.api_key,
    )
    settings = {"num_prompts": args.num_prompts, "max_concurrency": args.max_concurrency}
    show("speech", speech.run_speech(load), settings, args.output_json)
    return 0


def _add_startup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="checkpoint folder or hub name (default: the demo model)")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of the server, behind --")
    parser.add_argument("--serve-cmd", metavar="COMMAND", help="another server; {port} and {model} stand for these")
    parser.add_argument(
        "--num-iters-cold", type=int, default=1, metavar="N", help="starts with empty caches (default 1)"
    )
    parser.add_argument(
        "--num-iters-warmup", type=int, default=1, metavar="N", help="starts that do not count (default 1)"
    )
    parser.add_argument("--num-iters-warm", type=int, default=3, metavar="N", help="starts after those (default 3)")
    parser.add_argument("--timeout", type=float, default=600.0, help="bound on each start, seconds (default 600)")
    parser.add_argument("--output-json", metavar="FILE", help='write the figures as JSON; "-" for standard output')
    parser.set_defaults(run=run_startup)


def _add_embed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="checkpoint folder or hub name; of a server, the model to ask for")
    parser.add_argument("--base-url", help="a server's address; without one, this process embeds")
    parser.add_argument("--num-prompts", type=int, default=64, help="texts (default 64)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a text (default 128)")
    parser.add_argument("--length-spread", type=float, default=0.0, help="0.5 draws lengths from 50 %% to 150 %%")
    parser.add_argument("--token-range", default="10:250", metavar="LOW:HIGH", help="random token ids (default 10:250)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same texts")
    parser.add_argument("--num-latencies", type=int, default=20, help="texts one after another (default 20)")
    parser.add_argument("--repeats", type=int, default=3, help="runs that count (default 3)")
    parser.add_argument("--dtype", default="auto", help="float32, float16, bfloat16 (default: the checkpoint's)")
    parser.add_argument("--quantization", help="how weights are stored, for example int8")
    parser.add_argument("--num-threads", type=int, help="of the processor")
    parser.add_argument("--batch-size", type=int, default=32, help="of a server: texts of a request (default 32)")
    parser.add_argument("--max-concurrency", type=int, default=4, help="of a server: requests in flight (default 4)")
    parser.add_argument("--timeout", type=float, default=600.0, help="of a server: bound on a request, s (default 600)")
    parser.add_argument("--api-key", help="of a server; default: OPENAI_API_KEY of the environment")
    parser.add_argument("--output-json", metavar="FILE", help='write the figures as JSON; "-" for standard output')
    parser.set_defaults(run=run_embed, output_len=1, prefix_len=0)


def _add_peer_places(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where peers are")
    group.add_argument(
        "--peer-python", action="append", default=[], metavar="NAME=PYTHON", help="interpreter that has this peer"
    )
    group.add_argument("--gguf", metavar="FILE", help="the checkpoint as GGUF, for llama.cpp")
    group.add_argument("--onnx-model", metavar="FILE", help="the checkpoint as ONNX, for ONNX Runtime")
    group.add_argument("--openvino-model", metavar="FOLDER", help="the checkpoint as OpenVINO IR, for OpenVINO")


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", nargs="?", help="YAML file of ops and shapes (default: every op on one shape)")
    parser.add_argument("--ops", metavar="NAME,...", help="without a plan: only these ops")
    parser.add_argument(
        "--batch", metavar="BATCH", help="without a plan: attention and cache on this batch, for example q2k*4,8xq1k4k"
    )
    parser.add_argument("--dtype", default="bfloat16", help="without a plan: float32, float16, bfloat16 (the default)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--repeats", type=int, default=5, help="samples of each figure (default 5)")
    parser.add_argument("--num-threads", type=int, help="of the processor")
    parser.add_argument("--csv", metavar="FILE", help="write the figures as CSV")
    parser.add_argument("--svg", metavar="FILE", help="draw the figures beside their limits")
    parser.add_argument(
        "--output-json", "--json", metavar="FILE", help='write the figures as JSON; "-" for standard output'
    )
    parser.set_defaults(run=run_kernels)


def _add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="checkpoint folder or hub name (default: the demo model)")
    parser.add_argument(
        "--peers", metavar="NAME,...", help=f"of {', '.join(PEER_NAMES)} (default: all that are here; '': none)"
    )
    parser.add_argument(
        "--task",
        choices=("text", "vision", "embed", "serve", "speech"),
        default="text",
        help="vision: messages with an image; embed: embeddings; serve: clients of a server; speech: recordings to a "
        "Whisper (default text)",
    )
    parser.add_argument(
        "--situations",
        metavar="NAME,...",
        help="of first-token, decode, concurrent-N, prefill, memory (default: all, with 8 and 32 at once); of task "
        "vision: first-token, image, image-N, memory (default: all, with 64 tokens); of task embed: first-token, "
        "embed-N, embed-mixed, latency-N, memory (default: all, with texts of 16, 128 and 512 tokens); of task serve: "
        "first-token, clients-N, memory (default: all, with 16 and 64 clients); of task speech: first-token, file-N, "
        "files-N, memory (default: all, with a recording of 60 s, and 8 at once)",
    )
    parser.add_argument(
        "--recordings",
        type=Path,
        metavar="FOLDER",
        help="of task speech: WAV files of 16 kHz to cut from (default: texts that espeak-ng speaks)",
    )
    parser.add_argument(
        "--image-size", default="728x504", metavar="WIDTHxHEIGHT", help="of task vision, pixels (default 728x504)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--timeout", type=float, default=600.0, help="bound on each start and run, s (default 600)")
    parser.add_argument(
        "--one-at-a-time", action="store_true", help="keep only one engine in memory; all of them otherwise"
    )
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens (default 128)")
    parser.add_argument("--output-len", type=int, default=128, help="generated tokens (default 128)")
    parser.add_argument("--prefill-len", type=int, help="prompt tokens of prefill (default 2048, or the context)")
    parser.add_argument("--token-range", default="10:250", metavar="LOW:HIGH", help="random token ids (default 10:250)")
    parser.add_argument("--dtype", default="auto", help="float32, float16, bfloat16 (default: the checkpoint's)")
    parser.add_argument("--quantization", help="how Quire stores weights, for example int8")
    parser.add_argument(
        "--weight-formats",
        default="",
        metavar="NAME,...",
        help="of int8, int4: measured as well, beside llama.cpp with a GGUF file that is written for it; of task "
        "speech int8, w8a8, beside faster-whisper's int8",
    )
    parser.add_argument("--num-threads", type=int, help="of the processor, for every engine")
    parser.add_argument(
        "--output-json", "--json", metavar="FILE", help='write the figures as JSON; "-" for standard output'
    )
    parser.add_argument("--svg", metavar="FILE", help="draw the figures: bars beside those of ours")
    parser.add_argument("--html", metavar="FILE", help="the same with the tables, in one file")
    _add_peer_places(parser)
    parser.set_defaults(run=run_peers)


def _requests(args: argparse.Namespace) -> list[Any]:
    from quire_bench.report import check_json_path
    from quire_bench.workload import Workload, parse_token_range, random_requests

    check_json_path(args.output_json)
    low, high = parse_token_range(args.token_range)
    workload = Workload(
        num_requests=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        length_spread=args.length_spread,
        prefix_len=args.prefix_len,
        seed=args.seed,
    )
    return random_requests(workload, low=low, high=high)


def _show(title: str, figures: dict[str, Any], args: argparse.Namespace) -> None:
    from quire_bench.report import show

    hidden = ("run", "command", "kind", "api_key", "output_json")
    settings = {name: value for name, value in vars(args).items() if name not in hidden}
    show(title, figures, settings, args.output_json)


def _load(args: argparse.Namespace, requests: list[Any]) -> Any:
    from quire import LLM

    longest = max(len(request.prompt_token_ids) + request.output_len for request in requests)
    asked = {name: getattr(args, name) for name in ("dtype", "quantization", "num_threads", "max_num_seqs")}
    given = {name: value for name, value in asked.items() if value is not None}
    return LLM(args.model, max_model_len=longest, **given)


def run_throughput(args: argparse.Namespace) -> int:
    """`quire bench throughput`; with --peer, both engines in turn and the ratio of each pair."""
    from quire_bench.offline import compare_throughput, measure_throughput
    from quire_bench.peer_process import load_peer
    from quire_bench.report import progress_bar

    requests = _requests(args)
    options = _peer_options(args)
    with progress_bar() as progress, _load(args, requests) as llm:
        task = progress.add_task("throughput", total=args.repeats)
        if args.peer is None:
            figures = measure_throughput(llm, requests, repeats=args.repeats, on_run=lambda: progress.advance(task))
        else:
            with load_peer(
                args.peer,
                llm.model_folder,
                requests,
                dtype=llm.dtype,
                num_threads=args.num_threads,
                batch_size=args.peer_batch_size,
                options=options,
            ) as peer:
                figures = compare_throughput(
                    llm, peer, requests, repeats=args.repeats, on_run=lambda: progress.advance(task)
                )
    _show("throughput", figures, args)
    return 0


def _peer_options(args: argparse.Namespace) -> Any:
    from quire_bench.peers import PeerOptions
    from quire_interfaces import ConfigError

    pythons = {}
    for text in args.peer_python:
        name, found, python = text.partition("=")
        if not found:
            raise ConfigError(f"--peer-python must be NAME=PYTHON, got {text!r}", field="peer_python")
        pythons[name] = python
    files = {"--gguf": args.gguf, "--onnx-model": args.onnx_model, "--openvino-model": args.openvino_model}
    return PeerOptions(pythons=pythons, files={flag: path for flag, path in files.items() if path is not None})


def run_peers(args: argparse.Namespace) -> int:
    """`quire bench peers`; exit status 1 when Quire itself could not be measured in some situation."""
    from quire_bench.comparison_run import run_comparison

    return run_comparison(args, _peer_options(args))


def run_kernels(args: argparse.Namespace) -> int:
    """`quire bench kernels`."""
    from quire_bench.kernel_report import run_and_show

    run_and_show(args)
    return 0


def run_latency(args: argparse.Namespace) -> int:
    """`quire bench latency`."""
    from quire_bench.offline import measure_latency
    from quire_bench.report import progress_bar

    requests = _requests(args)
    with progress_bar() as progress, _load(args, requests) as llm:
        task = progress.add_task("latency", total=args.warmups + args.repeats)
        figures = measure_latency(
            llm, requests, repeats=args.repeats, warmups=args.warmups, on_run=lambda: progress.advance(task)
        )
    _show("latency", figures, args)
    return 0


def run_embed(args: argparse.Namespace) -> int:
    """`quire bench embed`."""
    from quire_bench.embed import ServerEmbedder, embed_offline, measure_embedding
    from quire_bench.report import progress_bar
    from quire_bench.serve import ServeLoad

    texts = [request.prompt_token_ids for request in _requests(args)]
    counts = {"repeats": args.repeats, "num_latencies": args.num_latencies}
    with progress_bar() as progress:
        task = progress.add_task("embed", total=args.repeats)
        if args.base_url is not None:
            load = ServeLoad(
                base_url=args.base_url,
                model=args.model,
                max_concurrency=args.max_concurrency,
                timeout_s=args.timeout,
                api_key=args.api_key,
            )
            server = ServerEmbedder(load, args.batch_size)
            try:
                figures = measure_embedding(server, texts, **counts, on_run=lambda: progress.advance(task))
            finally:
                server.close()
        else:
            from quire import LLM

            asked = {name: getattr(args, name) for name in ("dtype", "quantization", "num_threads")}
            given = {name: value for name, value in asked.items() if value is not None}
            longest = max(map(len, texts), default=None)
            with LLM(args.model, runner="pooling", max_model_len=longest, **given) as llm:
                embed = embed_offline(llm)
                figures = measure_embedding(embed, texts, **counts, on_run=lambda: progress.advance(task))
    _show("embed", figures, args)
    return 0


def run_bench_serve(args: argparse.Namespace) -> int:
    """`quire bench serve`; exit status 1 when a request failed."""
    from quire_bench import serve_commands

    return serve_commands.run_bench_serve(args)


def run_sweep_serve(args: argparse.Namespace) -> int:
    """`quire bench sweep serve`; exit status 1 when a request failed."""
    from quire_bench import serve_commands

    return serve_commands.run_sweep_serve(args)


def run_sweep_sla(args: argparse.Namespace) -> int:
    """`quire bench sweep serve-sla`; exit status 1 where not even the lowest load keeps to the limits."""
    from quire_bench import serve_commands

    return serve_commands.run_sweep_sla(args)


def run_plot_pareto(args: argparse.Namespace) -> int:
    """`quire bench sweep plot-pareto`."""
    from quire_bench import serve_commands

    return serve_commands.run_plot_pareto(args)


def run_startup(args: argparse.Namespace) -> int:
    """`quire bench startup`."""
    from quire_bench import serve_commands

    args.flags = [flag for flag in args.flags if flag != "--"]
    return serve_commands.run_startup(args)


def register_make_model(commands: Any) -> None:
    """Add `make-model` to an argparse subparsers object."""
    parser = commands.add_parser("make-model", help="write a random checkpoint with a real tokenizer, offline")
    parser.add_argument("folder", type=Path, help="where to write: a new or empty folder")
    families = "llama, mistral, qwen2, qwen3, mixtral, qwen3-moe, gpt-oss, mamba2, qwen3-next"
    parser.add_argument("--like", default="llama", help=f"family: {families} (default llama)")
    parser.add_argument("--size", default="tiny", help="shape: tiny, 60m, 0.6b, 1b, 8b (default tiny)")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32 (default bfloat16)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes")
    parser.add_argument("--max-shard-size", type=int, default=2 << 30, help="bytes of weights per file (default 2 GiB)")
    parser.set_defaults(run=run_make_model)


def run_make_model(args: argparse.Namespace) -> int:
    """`quire make-model`."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from quire_testkit.checkpoints import make_checkpoint

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
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
