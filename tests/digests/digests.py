"""Digests of what users get: tokens and logits of every architecture and feature, and answers of the server.

    python tests/digests/digests.py compute NEW.json [server] [features] [models]
    python tests/digests/digests.py compare tests/digests/baseline.json NEW.json

Computes with whatever version of the packages Python imports, through names that are long-lived: run it on two commits
and compare. Digests of tokens, texts and JSON must be equal; logits are compared by a few of their values, within
rounding of float32, and the report counts networks whose bits are the same. One thread, the demo model, and tiny random
checkpoints that Transformers makes; the bits are those of one processor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Digests = dict[str, Any]
TOLERANCE = 2e-5
"""Largest difference of a logit, as a share of the largest logit."""
NUM_PROMPT, NUM_TOKENS = 17, 6
NUM_VALUES = 6
"""Logits of each network that are kept as numbers."""


def digest(value: Any) -> str:
    """Of anything that JSON holds."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def compute_models() -> Iterator[tuple[str, Digests]]:
    """Of every architecture of docs/models.md: greedy and seeded tokens, and the logits behind them."""
    from quire_testkit.parity.cases import CASES

    for architecture, case in sorted(CASES.items()):
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield architecture, _model(architecture, case, folder)
            except Exception as error:
                yield architecture, {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def _model(architecture: str, case: Any, folder: str) -> Digests:
    import torch

    from quire_models import ModelConfig, load_model
    from quire_testkit.parity.oracle import write_checkpoint
    from quire_testkit.parity.situations import SITUATIONS, serve

    write_checkpoint(folder, architecture, case)
    config = ModelConfig.from_path(folder)
    length = 70 if config.generates and config.max_encoder_len else NUM_PROMPT  # `serve` measures blocks by it
    config = config.within(length + NUM_TOKENS)
    network: Any = load_model(config, folder, dtype="float32")
    choose = random.Random(architecture).choices
    prompt = choose(range(3, config.vocab_size), k=length)
    if not config.generates:
        return _values(torch.cat(network.read([prompt, prompt[:5]])))
    encoder = choose(range(3, config.vocab_size), k=11) if config.max_encoder_len else []
    seen = serve(network, SITUATIONS["chunks of 7"], prompt, NUM_TOKENS, encoder)
    rows = [logits for name in ("greedy", "seeded") for _, logits in sorted(seen[name].logits.items())]
    return {"exact": digest([seen[name].token_ids for name in ("greedy", "seeded")]), **_values(torch.stack(rows))}


def _values(numbers: Any) -> Digests:
    numbers = numbers.float().contiguous()
    step = max(1, numbers.numel() // NUM_VALUES)
    return {
        "bits": hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16],
        "largest": float(numbers.abs().max()),
        "values": [float(f"{value:.7g}") for value in numbers.flatten()[::step][:NUM_VALUES].tolist()],
    }


def compute_features() -> Iterator[tuple[str, Digests]]:
    """Of every row of docs/features.md: each feature of engines, with every feature of requests."""
    import quire
    from quire_testkit.features import ENGINE

    sys.path.append(str(Path(quire.__file__).parents[2] / "tests"))
    from llm_demo_heads import write_medusa_heads, write_with_mtp_layer

    with tempfile.TemporaryDirectory() as folder:
        heads = {
            "MTP drafts": lambda: {"model": str(write_with_mtp_layer(Path(folder) / "mtp"))},
            "Medusa drafts": lambda: {"speculative_model": str(write_medusa_heads(Path(folder) / "medusa"))},
        }
        engines = {"none": {}, **{name: fields for kind in ENGINE.values() for name, fields in kind.items()}}
        for name, settings in engines.items():
            yield name, _engine({**settings, **heads.get(name, dict)()})


def _engine(settings: dict[str, Any]) -> Digests:
    from quire import LLM, BeamSearchParams
    from quire_demo_model import adapter_paths
    from quire_testkit.features import REQUEST, requests_of_pairs

    plain: dict[str, Any] = {
        "num_threads": 1, "max_model_len": 256, "max_num_seqs": 16, "num_gpu_blocks_override": 200, "block_size": 8,
        "max_num_batched_tokens": 512, "enable_prefix_caching": False, "async_scheduling": False,
        "speculative_adaptive": False,
    }  # fmt: skip
    if "model" in settings:
        settings["lora_modules"] = tuple(f"{name}={path}" for name, path in adapter_paths().items())
    requests = {
        one: request
        for (one, other), request in requests_of_pairs(max_tokens=8).items()
        if one == other and not request.num_images
    }
    with LLM(**{**plain, **settings}) as llm:
        prompt = llm.renderer.render_chat([{"role": "user", "content": "Spell the word basket."}]).token_ids
        params, adapters = [each.params for each in requests.values()], [each.adapter for each in requests.values()]
        outputs = llm.generate([prompt] * len(requests), params, use_tqdm=False, lora_request=adapters)
        beams = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=5))
    answers = dict(zip([*requests, "beam search"], [*outputs, *beams], strict=True))
    assert answers.keys() == REQUEST.keys() - {"media"}
    return {
        "exact": {
            name: digest([(one.token_ids, one.text, str(one.finish_reason)) for one in answer.outputs])
            for name, answer in answers.items()
        }
    }


def compute_server() -> Iterator[tuple[str, Digests]]:
    """Of the answers to `CONVERSATIONS`, without ids and times."""
    from conversations import CONVERSATIONS

    with _server() as url:
        for name, (path, body) in CONVERSATIONS.items():
            status, text = _post(url + path, body)
            answer = _normalized(text)
            yield (
                name,
                {"exact": digest([status, _stream(answer) if body.get("stream") else answer]), "text": answer[:300]},
            )


@contextmanager
def _server() -> Iterator[str]:
    command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", "--num-threads", "1"]
    command += ["--max-model-len", "512", "--response-store", "none", "--structured-output-timeout", "300"]
    command += ["--no-enable-prefix-caching"]
    with tempfile.NamedTemporaryFile("r") as log, open(log.name, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while (address := re.search(r"OpenAI API:\s+(http://\S+)/v1", Path(log.name).read_text())) is None:
                if process.poll() is not None:
                    raise RuntimeError(Path(log.name).read_text())
                time.sleep(0.2)
            yield address[1]
        finally:
            process.terminate()
            process.wait()


def _post(url: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _normalized(text: str) -> str:
    """An answer without what differs from call to call: ids, times, and the borders of events that hold one text."""
    text = re.sub(
        r'"(id|item_id|request_id|call_id|response_id|tool_call_id|system_fingerprint)":\s*"[^"]*"', r'"\1":0', text
    )
    text = re.sub(r'"(created|created_at|completed_at|expires_at)":\s*[0-9.]+', r'"\1":0', text)
    return re.sub(r'"(log_?probs?|top_logprobs|cumulative_logprob)":\s*(-?[0-9][0-9.e-]*)', _rounded, text)


def _stream(text: str) -> dict[str, Any]:
    """A stream without what depends on time, which is how its text is cut: all text by its place in events, and what
    else any of the events says but null, which a stream of one event may not say."""
    texts: dict[str, str] = {}
    others: set[str] = set()
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        for place, value in _leaves(json.loads(line.removeprefix("data: "))):
            key = place.rsplit(".", 1)[-1]
            if key in ("content", "text", "delta", "arguments", "partial_json") and isinstance(value, str):
                texts[place] = texts.get(place, "") + value
            elif key != "sequence_number" and value is not None:
                others.add(json.dumps([place, value]))
    return {"texts": texts, "others": sorted(others)}


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _leaves(value[key], f"{place}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{place}.{index}")
    else:
        yield place, value


def _rounded(match: re.Match[str]) -> str:
    return f'"{match[1]}":{float(match[2]):.3f}'


SECTIONS: dict[str, Callable[[], Iterator[tuple[str, Digests]]]] = {
    "server": compute_server,
    "features": compute_features,
    "models": compute_models,
}


def compute(path: Path, sections: list[str]) -> None:
    """Compute digests and write them into the file entry by entry; it keeps what else it holds."""
    for section in sections or list(SECTIONS):
        for name, entry in SECTIONS[section]():
            print(f"{section}: {name}", flush=True)
            digests = json.loads(path.read_text()) if path.exists() else {}
            digests.setdefault(section, {})[name] = entry
            path.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


def compare(old: dict[str, dict[str, Digests]], new: dict[str, dict[str, Digests]]) -> list[str]:
    """What differs, one line each: of the entries that both have, and those that the new file lacks."""
    lines = []
    for section, entries in old.items():
        if section not in new:
            lines.append(f"{section}: not computed")
            continue
        for name, before in entries.items():
            after = new[section].get(name)
            if after is None:
                lines.append(f"{section}: {name}: missing")
            elif before.get("exact") != after.get("exact") or before.get("error") != after.get("error"):
                lines.append(f"{section}: {name}: was {before}, is {after}")
            elif "values" in before:
                gap = max(abs(a - b) for a, b in zip(before["values"], after["values"], strict=True))
                if gap > TOLERANCE * before["largest"]:
                    lines.append(f"{section}: {name}: logits differ by {gap / before['largest']:.1e}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    computing = commands.add_parser("compute", help="write digests of what Python imports now")
    computing.add_argument("file", type=Path)
    computing.add_argument("sections", nargs="*", choices=[[], *SECTIONS], help="all when none is named")
    comparing = commands.add_parser("compare", help="say what differs")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    options = parser.parse_args()
    if options.command == "compute":
        compute(options.file, options.sections)
        return 0
    old, new = (json.loads(path.read_text()) for path in (options.old, options.new))
    lines = compare(old, new)
    print("\n".join(lines) or "no difference")
    networks = [(entry, new.get("models", {}).get(name, {})) for name, entry in old.get("models", {}).items()]
    num_same = sum("bits" in before and before["bits"] == after.get("bits") for before, after in networks)
    print(f"{num_same} of {len(networks)} networks have the same bits of logits")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
