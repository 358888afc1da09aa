"""Whole engines on a GPU beside the same on the CPU: what users do, feature by feature, on the embedded demo model.

    python apps/bench/benchmarks/gpu_llm.py features server tests --out results.json

`features` makes an engine on either device for each of FEATURES, in float32, gives both the same requests, and counts
the answers whose tokens are equal. `server` starts `quire serve` on the GPU and asks it as clients do. `tests` runs the
tests of packages/llm with QUIRE_DEVICE set, in several processes. Runs in a bare checkout, like gpu_check.py; needs
what the server imports.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gpu_check import ROOT, SOURCES, Results, _counts_by_file, write_entry_points

PROMPTS = ("Quire is", "A page of the KV cache", "What is 7 times 8?", "1, 2, 3, 4,", "Spell the word page:", "Once")
QUESTIONS = ("What is 12 + 34?", "Who are you?", "Spell the word block.", "Say hello.")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name"]}
MEMORY = {"gpu_memory_utilization": 0.2, "max_model_len": 512, "max_num_seqs": 16}
FEATURES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "kernel by kernel": {"enforce_eager": True},
    "steps in turn": {"async_scheduling": False},
    "one-token chunks": {"max_num_batched_tokens": 16, "block_size": 4},
    "cache nearly full": {"num_gpu_blocks_override": 24, "block_size": 8, "max_model_len": 128},
    "n-grams": {"speculative_method": "ngram", "num_speculative_tokens": 4},
    "draft model": {"speculative_method": "draft_model", "num_speculative_tokens": 3},
    "eagle3": {"speculative_method": "eagle3", "num_speculative_tokens": 3},
    "adapters": {"enable_lora": True},
    "int8 weights": {"quantization": "int8"},
    "int4 weights": {"quantization": "int4"},
    "w8a8": {"quantization": "w8a8"},
    "fp8 weights": {"quantization": "fp8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "bfloat16": {"dtype": "bfloat16"},
}
"""Settings of each pair of engines."""
TESTS = (
    "llm", "lm", "determinism", "features", "extremes", "beam_search", "parity", "parity_hybrids", "parity_options",
    "kv_cache_dtype", "kv_cache_families", "lora_parity", "lora_reload", "lora_merging", "media_engine",
    "media_families", "pooling", "pooling_decoders", "prompt_embeds", "encoder_decoder", "recurrent_drafts",
    "routed_experts", "llm_threads", "speculation", "structured_outputs", "quantize",
)  # fmt: skip
"""Ends of the names of test files in packages/llm that part "tests" runs, those that there are."""


def answers(device: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What an engine answers: name of the request -> tokens."""
    from quire import LLM, LoRARequest, SamplingParams
    from quire_demo_model import adapter_paths, draft_paths
    from quire_interfaces import StructuredOutputsParams

    settings = {"dtype": "float32", **MEMORY, **settings, "device": device}
    if (method := settings.get("speculative_method")) in draft_paths():
        settings["speculative_model"] = str(draft_paths()[method])
    tokens: dict[str, Any] = {}
    with LLM(**settings) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        seeded = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=7, max_tokens=48, presence_penalty=0.3)
        masked = SamplingParams(
            temperature=0.7, seed=3, max_tokens=60, structured_outputs=StructuredOutputsParams(json=SCHEMA)
        )
        ranked = SamplingParams(temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=2)
        for name, params in (("greedy", greedy), ("again", greedy), ("seeded", seeded), ("ranked", ranked)):
            for prompt, output in zip(PROMPTS, llm.generate(list(PROMPTS), params, use_tqdm=False), strict=True):
                tokens[f"{name} {prompt}"] = list(output.outputs[0].token_ids)
        for question in QUESTIONS:
            message = [{"role": "user", "content": question}]
            for name, params in (("chat", greedy), ("schema", masked)):
                (output,) = llm.chat(message, params, use_tqdm=False)
                tokens[f"{name} {question}"] = list(output.outputs[0].token_ids)
                if name == "schema" and output.outputs[0].finish_reason == "stop":
                    json.loads(output.outputs[0].text)
        if settings.get("enable_lora"):
            for number, (name, path) in enumerate(adapter_paths().items(), start=1):
                request = LoRARequest(name, number, str(path))
                for output in llm.generate(list(PROMPTS), greedy, use_tqdm=False, lora_request=request):
                    tokens[f"{name} {output.prompt}"] = list(output.outputs[0].token_ids)
    gc.collect()
    return tokens


def run_features(results: Results, device: str) -> None:
    """Each feature on the device, and on the CPU."""
    for name, settings in FEATURES.items():
        start = time.perf_counter()
        try:
            expected = answers("cpu", settings)
            host_s, start = time.perf_counter() - start, time.perf_counter()
            got = answers(device, settings)
        except Exception:
            results.add("features", name, passes=False, error=traceback.format_exc()[-1800:])
            continue
        different = {key: _first_difference(expected[key], got[key]) for key in expected if expected[key] != got[key]}
        num_tokens = sum(map(len, expected.values()))
        results.add(
            "features", name, requests=len(expected), equal=len(expected) - len(different), tokens=num_tokens,
            first_differences=different, cpu_s=round(host_s, 1), device_s=round(time.perf_counter() - start, 1),
        )  # fmt: skip


def _first_difference(expected: list[int], got: list[int]) -> int:
    pairs = zip(expected, got, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(got)))


@contextlib.contextmanager
def served(environment: dict[str, str], *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server's address and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from quire_server.cli import main; raise SystemExit(main())", "serve"]
    command += ["--port", str(port), *arguments]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_server(results: Results, device: str, environment: dict[str, str]) -> None:
    """`quire serve` on the device: start, a chat, a stream, sixteen clients at once."""
    import httpx

    start = time.perf_counter()
    arguments = ["--device", device, "--gpu-memory-utilization", "0.3"]
    with served(environment, *arguments) as (url, process), httpx.Client(base_url=url, timeout=60) as client:
        try:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        break
                if process.poll() is not None or time.perf_counter() - start > 120:
                    raise RuntimeError("the server did not start")
                time.sleep(0.2)
            results.add("server", "start", seconds=time.perf_counter() - start)

            def ask(number: int) -> tuple[float, float, int]:
                """Seconds to the first token and to the last, and number of tokens."""
                body = {"messages": [{"role": "user", "content": f"What is {number} + 5?"}], "stream": True}
                body |= {
                    "max_tokens": 64,
                    "temperature": 0.7,
                    "seed": number,
                    "ignore_eos": True,
                    "model": "quire-demo",
                }
                body |= {"stream_options": {"include_usage": True}}
                begin, first, count = time.perf_counter(), 0.0, 0
                with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    if response.status_code != 200:
                        raise RuntimeError(response.read().decode())
                    for line in response.iter_lines():
                        if line.startswith("data: {"):
                            event = json.loads(line.removeprefix("data: "))
                            if "error" in event:
                                raise RuntimeError(line)
                            count = (event.get("usage") or {}).get("completion_tokens", count)
                            first = first or time.perf_counter() - begin
                return first, time.perf_counter() - begin, count

            ask(0)
            first, whole, count = ask(1)
            results.add("server", "one stream", first_token_s=first, whole_s=whole, tokens=count)
            begin = time.perf_counter()
            with ThreadPoolExecutor(16) as pool:
                figures = list(pool.map(ask, range(64)))
            seconds = time.perf_counter() - begin
            rate = sum(count for _, _, count in figures) / seconds
            results.add("server", "64 streams, 16 at once", tokens_per_s=rate, seconds=seconds)
            text = client.get("/metrics").text
            compiled = [line for line in text.splitlines() if "jit_compilations_total{" in line]
            results.add("server", "compiled while serving", kernels=compiled)
        except Exception:
            os.killpg(process.pid, signal.SIGTERM)
            output = process.communicate(timeout=30)[0]
            results.add("server", "failed", passes=False, error=traceback.format_exc()[-1500:], output=output[-3000:])


def run_tests(results: Results, device: str, environment: dict[str, str], names: Sequence[str], limit_s: float) -> None:
    """Tests of the engine's packages with the device as every engine's default."""
    files = [ROOT / "packages/llm/tests" / f"test_quire_{name}.py" for name in names]
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT), "--tb=short"]
        command += [
            "-p",
            "no:cacheprovider",
            "--import-mode=importlib",
            "--asyncio-mode=auto",
            f"--junitxml={report}",
            "-n",
            "12",
        ]
        command += ["--dist", "worksteal", *(str(path) for path in files if path.is_file())]
        settings = {"QUIRE_DEVICE": device, "QUIRE_GPU_MEMORY_UTILIZATION": "0.05"}
        process = subprocess.Popen(
            command, env={**environment, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            text, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                text, _ = process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                text, _ = process.communicate()
        for file, counts in _counts_by_file(report).items():
            results.add("tests", file, **counts)
        results.add("tests", "packages/llm", passes=process.returncode == 0, summary=text.strip().splitlines()[-80:])


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 when something failed."""
    parser = argparse.ArgumentParser(description="Whole engines on a GPU beside the same on the CPU.")
    parser.add_argument("parts", nargs="+", choices=("features", "server", "tests"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="file for all figures, written after each")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="ends of the names of test files")
    parser.add_argument("--tests-limit-s", type=float, default=180.0, help="seconds after which tests are cut short")
    args = parser.parse_args(arguments)
    results = Results(args.out)
    with tempfile.TemporaryDirectory() as temporary:
        write_entry_points(Path(temporary))
        folders = [temporary, *SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
        sys.path.insert(0, temporary)
        parts: dict[str, Callable[[], None]] = {
            "features": lambda: run_features(results, args.device),
            "server": lambda: run_server(results, args.device, environment),
            "tests": lambda: run_tests(results, args.device, environment, args.tests, args.tests_limit_s),
        }
        for part in args.parts:
            start = time.perf_counter()
            try:
                parts[part]()
            except Exception:
                results.add(part, "failed", passes=False, error=traceback.format_exc()[-3000:])
            results.add(part, "took", seconds=time.perf_counter() - start)
    return 0 if all(figure.get("passes", True) for figure in results.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
