"""Flags of `quire bench serve` and of sweeps, vLLM's names where it has them, and what they become. Only argparse is
imported until they are read."""

from __future__ import annotations

import argparse
import json
import math
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_bench.datasets import TextTokenizer
    from quire_bench.serve import ServeLoad, ServeRequest

__all__ = ["DATASETS", "add_dataset_flags", "add_load_flags", "add_result_flags", "load_of", "requests_of"]

DATASETS = (
    "random", "prefix_repetition", "sharegpt", "sonnet", "custom", "multi-turn", "random-mm", "custom-mm",
)  # fmt: skip
BACKENDS = ("openai", "vllm", "openai-chat")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """What is asked, beside the lengths of random prompts."""
    group = parser.add_argument_group("data set")
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="default: random")
    group.add_argument("--dataset-path", metavar="FILE", help="of sharegpt, sonnet, custom, multi-turn, custom-mm")
    group.add_argument("--tokenizer", metavar="FOLDER", help="counts and makes texts; needed where lengths are exact")
    group.add_argument("--sharegpt-output-len", type=int, metavar="N", help="(default: as long as the file's answers)")
    group.add_argument("--sonnet-input-len", type=int, default=550, metavar="N", help="(default 550)")
    group.add_argument("--sonnet-output-len", type=int, default=150, metavar="N", help="(default 150)")
    group.add_argument("--sonnet-prefix-len", type=int, default=200, metavar="N", help="shared by all (default 200)")
    group.add_argument(
        "--custom-output-len", type=int, metavar="N", help="(default: output_tokens of each line, or as the model ends)"
    )
    for name, default in (("prefix-len", 256), ("suffix-len", 256), ("num-prefixes", 10), ("output-len", 128)):
        group.add_argument(
            f"--prefix-repetition-{name}", type=int, default=default, metavar="N", help=f"(default {default})"
        )
    group.add_argument("--multi-turn-output-len", type=int, default=128, metavar="N", help="of each turn (default 128)")
    group.add_argument("--multi-turn-max-turns", type=int, metavar="N", help="of a conversation (default: all)")
    group.add_argument("--images-per-request", type=int, default=1, metavar="N", help="of random-mm (default 1)")
    group.add_argument("--image-size", default="640x480", metavar="WIDTHxHEIGHT", help="of random-mm (default 640x480)")
    group.add_argument("--image-spread", type=float, default=0.0, help="0.5 draws sizes from 50 %% to 150 %%")
    group.add_argument(
        "--image-prompt", default="Describe this image.", metavar="TEXT", help="beside images of a folder"
    )


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Where and how requests are sent."""
    group = parser.add_argument_group("server and load")
    group.add_argument(
        "--backend", choices=BACKENDS, default="openai", help="openai-chat sends messages (default openai)"
    )
    group.add_argument("--base-url", help="default: http://HOST:PORT")
    group.add_argument("--host", default="127.0.0.1", help="(default 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="(default 8000)")
    group.add_argument("--endpoint", metavar="PATH", help="default: the backend's, e.g. /v1/completions")
    group.add_argument("--model", "--served-model-name", help="model name to ask for (default: the server's first)")
    group.add_argument(
        "--max-concurrency", type=int, help="requests in flight (default 16; with --request-rate, no bound)"
    )
    group.add_argument("--request-rate", type=float, help="requests per second; inf: no pause (default: no pause)")
    group.add_argument(
        "--burstiness", type=float, default=1.0, help="1 Poisson, less in bursts, more evenly (default 1)"
    )
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate grow")
    group.add_argument("--ramp-up-start-rps", type=float, metavar="RATE", help="from")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="RATE", help="to")
    group.add_argument("--timeout", type=float, default=600.0, help="bound on the whole run, seconds (default 600)")
    group.add_argument("--api-key", help="default: OPENAI_API_KEY of the environment")
    group.add_argument("--header", nargs="+", default=[], metavar="KEY=VALUE", help="more headers")
    group.add_argument("--extra-body", metavar="JSON", help="more fields of each request")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="ask for exact lengths (default: on)"
    )
    for name in SAMPLING:
        kind = int if name == "top_k" else float
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="VALUE", help=argparse.SUPPRESS)
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="SECONDS",
        help="wait so long for the server to be ready (default 0: do not wait)",
    )  # fmt: skip
    group.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests before those that count")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    """What is told of it."""
    group = parser.add_argument_group("results")
    group.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAME,...", help="(default: all four)"
    )
    group.add_argument("--metric-percentiles", default="50,90,99", metavar="NUMBER,...", help="(default 50,90,99)")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="goals of a request, e.g. ttft:200 tpot:50"
    )
    group.add_argument("--label", help="of the results")
    group.add_argument("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="more fields of the results")


def _pairs(texts: Sequence[str], flag: str) -> dict[str, str]:
    from quire_interfaces import ConfigError

    pairs = {}
    for text in texts:
        name, found, value = text.partition("=")
        if not found or not name:
            raise ConfigError(f"{flag} takes KEY=VALUE, got {text!r}", field=flag.strip("-"))
        pairs[name] = value
    return pairs


def load_of(args: argparse.Namespace) -> ServeLoad:
    """How requests are sent.

    Raises:
        ConfigError: a flag that cannot work.
    """
    from quire_bench.arrivals import RampUp
    from quire_bench.serve import ServeLoad
    from quire_interfaces import ConfigError

    body = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    if args.extra_body is not None:
        try:
            more = json.loads(args.extra_body)
        except ValueError as error:
            raise ConfigError(f"--extra-body is no JSON: {error}", field="extra_body") from None
        if not isinstance(more, dict):
            raise ConfigError("--extra-body must be a JSON object", field="extra_body")
        body |= more
    ramp_up = None
    if args.ramp_up_strategy is not None:
        if args.ramp_up_start_rps is None or args.ramp_up_end_rps is None:
            raise ConfigError(
                "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps", field="ramp_up_strategy"
            )
        if args.request_rate is not None:
            raise ConfigError(
                "--request-rate and --ramp-up-strategy say the same thing; give one", field="request_rate"
            )
        ramp_up = RampUp(strategy=args.ramp_up_strategy, start_rps=args.ramp_up_start_rps, end_rps=args.ramp_up_end_rps)
    has_rate = ramp_up is not None or (args.request_rate is not None and not math.isinf(args.request_rate))
    return ServeLoad(
        base_url=args.base_url or f"http://{args.host}:{args.port}",
        model=args.model,
        max_concurrency=16 if args.max_concurrency is None and not has_rate else args.max_concurrency,
        request_rate=args.request_rate,
        timeout_s=args.timeout,
        api_key=args.api_key,
        extra_body=body,
        seed=args.seed,
        backend=args.backend,
        endpoint=args.endpoint,
        burstiness=args.burstiness,
        ramp_up=ramp_up,
        extra_headers=_pairs(args.header, "--header"),
        ignore_eos=args.ignore_eos,
    )


def metadata_of(args: argparse.Namespace) -> dict[str, str]:
    """More fields of the results. Raises ConfigError."""
    return _pairs(args.metadata, "--metadata")


def _tokenizer(folder: str | None) -> TextTokenizer | None:
    if folder is None:
        return None
    from quire_models.hub import resolve_model
    from quire_renderers import load_tokenizer

    return load_tokenizer(resolve_model(folder))


def requests_of(args: argparse.Namespace) -> list[ServeRequest]:
    """What is asked.

    Raises:
        QuireError: a flag that cannot work, or a file that cannot be read.
    """
    from quire_bench import datasets
    from quire_bench.workload import BenchRequest, Workload, parse_token_range, random_requests
    from quire_interfaces import ConfigError

    common = {"count": args.num_prompts, "seed": args.seed}
    path, tokenizer = args.dataset_path, _tokenizer(args.tokenizer)
    token_range = parse_token_range(args.token_range)
    match args.dataset_name:
        case "sharegpt":
            return [
                *datasets.sharegpt_requests(path, **common, output_len=args.sharegpt_output_len, tokenizer=tokenizer)
            ]
        case "sonnet":
            lengths = {name: getattr(args, f"sonnet_{name}") for name in ("input_len", "output_len", "prefix_len")}
            return [*datasets.sonnet_requests(path, **common, **lengths, tokenizer=tokenizer)]
        case "custom":
            return [*datasets.custom_requests(path, **common, output_len=args.custom_output_len, tokenizer=tokenizer)]
        case "multi-turn":
            turns = {"output_len": args.multi_turn_output_len, "max_turns": args.multi_turn_max_turns}
            return [*datasets.multi_turn_requests(path, **common, **turns)]
        case "custom-mm":
            length = args.custom_output_len or 128
            return [*datasets.image_file_requests(path, **common, output_len=length, prompt=args.image_prompt)]
        case "random-mm":
            try:
                width, height = (int(side) for side in args.image_size.lower().split("x"))
            except ValueError:
                raise ConfigError(
                    f"--image-size must be WIDTHxHEIGHT, got {args.image_size!r}", field="image_size"
                ) from None

            def prompt_of(chooser: random.Random) -> str:
                if tokenizer is None:
                    return str(args.image_prompt)
                words = datasets.word_ids(tokenizer, *token_range)
                return datasets.text_of_length(tokenizer, args.input_len, chooser, words)

            pictures = {"images": args.images_per_request, "size": (width, height), "spread": args.image_spread}
            return [
                *datasets.random_image_requests(**common, **pictures, output_len=args.output_len, prompt_of=prompt_of)
            ]
        case "prefix_repetition":
            lengths = {
                name: getattr(args, f"prefix_repetition_{name}")
                for name in ("num_prefixes", "prefix_len", "suffix_len", "output_len")
            }
            ids: list[BenchRequest] = datasets.prefix_repetition_requests(
                num_requests=args.num_prompts, seed=args.seed, token_range=token_range, **lengths
            )
        case _:
            workload = Workload(
                num_requests=args.num_prompts,
                input_len=args.input_len,
                output_len=args.output_len,
                length_spread=args.length_spread,
                prefix_len=args.prefix_len,
                seed=args.seed,
            )
            ids = random_requests(workload, low=token_range[0], high=token_range[1])
    if args.backend != "openai-chat" or tokenizer is None:
        return [*ids]  # for a chat, sending says what is missing
    return [*datasets.texts_of_ids(ids, tokenizer, args.seed)]
