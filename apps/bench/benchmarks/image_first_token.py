"""Time to the first token of conversations with an image that was seen before, beside texts of the same length.

    python apps/bench/benchmarks/image_first_token.py [--model FOLDER] [--rounds 9] [--size 1000]

Turn by turn, each in a conversation of its own that shares no prefix with others: a text, and an image that this server
has seen in another conversation; by the next server with the same folder, an image that it has on disk only; by another
one, an image that is new, which it prepares and encodes. All have the same number of tokens, give or take three of the
number that each begins with. The random LLaVA of no --model has 576 embeddings for an image, and a language model of 8
layers of width 512. Prints medians, their ratio, and how many items were prepared and encoded.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from media_serving import Server, jpeg, running

LANGUAGE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
TOWER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}

QUESTION = "what is this "

_numbers = itertools.count(1)


def messages(text: str, image: bytes | None) -> list[dict[str, Any]]:
    """A conversation whose beginning no other one has."""
    content: list[dict[str, Any]] = [{"type": "text", "text": f"{next(_numbers):06d} {text}"}]
    if image is not None:
        url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": content}]


async def first_token_s(session: aiohttp.ClientSession, server: Server, conversation: Any, num_tokens: int) -> float:
    """Seconds until an answer of one token is there."""
    body = {"messages": conversation, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    start = time.perf_counter()
    async with session.post(f"{server.url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
    seconds = time.perf_counter() - start
    assert response.status == 200, answer
    assert abs(answer["usage"]["prompt_tokens"] - num_tokens) <= 3, (answer["usage"], num_tokens)
    return seconds


async def num_tokens_of(session: aiohttp.ClientSession, server: Server, conversation: Any) -> int:
    body = {"messages": conversation}
    async with session.post(f"{server.url}/tokenize", json=body) as response:
        answer = await response.json()
    return int(answer["count"])


async def text_of_length(session: aiohttp.ClientSession, server: Server, num_tokens: int) -> str:
    """A text whose conversation has so many tokens."""
    low, high = 0, 8 * num_tokens
    while low < high:
        middle = (low + high) // 2
        if (
            await num_tokens_of(session, server, messages("a b " * (middle // 4) + "a b "[: middle % 4], None))
            < num_tokens
        ):
            low = middle + 1
        else:
            high = middle
    return "a b " * (low // 4) + "a b "[: low % 4]


async def costs(session: aiohttp.ClientSession, server: Server) -> dict[str, float]:
    """Items that were prepared, and that were encoded, since the server's start."""
    async with session.get(f"{server.url}/metrics") as response:
        text = await response.text()
    names = ("mm_prepared_items_total", "mm_encoded_items_total")
    found = {name: re.findall(rf'^quire:{name}{{[^}}]*"image"[^}}]*}} (.*)$', text, re.MULTILINE) for name in names}
    return {name: float(values[0]) if values else 0.0 for name, values in found.items()}


async def measure(model: str, rounds: int, size: int) -> None:
    """Prints the figures."""
    images = [jpeg((size, size * 3 // 4), seed) for seed in range(rounds)]
    text = ""
    with tempfile.TemporaryDirectory() as disk:
        arguments = ["--kv-disk-path", disk, "--kv-disk-size", "1G", "--max-model-len", "2048"]
        for case in ("seen before", "on disk", "new"):
            async with running(model, *arguments) as (server, session):
                num_tokens = await num_tokens_of(session, server, messages(QUESTION, images[0]))
                text = text or await text_of_length(session, server, num_tokens)
                await first_token_s(session, server, messages(text, None), num_tokens)
                if case == "seen before":
                    for image in images:
                        await first_token_s(session, server, messages(QUESTION, image), num_tokens)
                if case == "new":
                    images = [jpeg((size, size * 3 // 4), rounds + seed) for seed in range(rounds)]
                before = await costs(session, server)
                texts, seeing = [], []
                for image in images:
                    texts.append(await first_token_s(session, server, messages(text, None), num_tokens))
                    seeing.append(await first_token_s(session, server, messages(QUESTION, image), num_tokens))
                text_ms, image_ms = (1e3 * statistics.median(samples) for samples in (texts, seeing))
                print(
                    f"image {case:12} {image_ms:8.1f} ms, text {text_ms:8.1f} ms, ratio {image_ms / text_ms:5.2f};"
                    f" {await spent(session, server, before)}"
                )
    print(f"{num_tokens} tokens, images of {size} x {size * 3 // 4} pixels, medians of {rounds} rounds")


async def spent(session: aiohttp.ClientSession, server: Server, before: dict[str, float]) -> str:
    after = await costs(session, server)
    return ", ".join(f"{name} + {after[name] - before[name]:g}" for name in after)


@contextmanager
def model_folder(path: str | None) -> Iterator[str]:
    """The folder, or that of a random LLaVA."""
    if path is not None:
        yield path
        return
    from quire_testkit.seeing_models import SeeingModel

    with tempfile.TemporaryDirectory() as folder:
        SeeingModel(Path(folder), image_size=192, text_config=LANGUAGE, vision_config=TOWER)
        yield folder


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="checkpoint folder; default: a random LLaVA")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", type=int, default=1000, help="pixels of the images' longer side")
    args = parser.parse_args()
    with model_folder(args.model) as model:
        asyncio.run(measure(model, args.rounds, args.size))


if __name__ == "__main__":
    main()
