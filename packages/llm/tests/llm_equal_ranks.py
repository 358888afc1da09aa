"""Tokens and bits of log probabilities of ranks, stages and engines beside those of one process, over many networks.

    python packages/llm/tests/llm_equal_ranks.py                     # all, in float32 and bfloat16
    python packages/llm/tests/llm_equal_ranks.py --networks Mixtral Whisper --dtypes bfloat16 --layouts tp2 pp2

Networks are random and tiny, ranks and engines threads of this process. Each cell of the table says whether all tokens
and all log probabilities are equal, in every bit; the exit status is 1 where some are not.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llm_prepared_prompts import PreparedPrompts
from llm_thread_ranks import client_in_threads, ranks_in_threads

from quire import QuireConfig, SamplingParams
from quire_engine import AsyncEngine
from quire_interfaces import ConfigError, OutputKind, RenderedPrompt, RequestOptions
from quire_testkit.media_files import tone
from quire_testkit.media_models import MediaModel
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.seeing_models import drawing
from quire_testkit.tokenizers import write_tokenizer

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "pp2": {"pipeline_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "tp2xpp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
}
"""Name -> settings."""
DTYPES = ("float32", "bfloat16")
NETWORKS: dict[str, str] = {
    "LlamaForCausalLM": "grouped queries",
    "Gemma3ForCausalLM": "sliding windows",
    "BloomForCausalLM": "linear biases",
    "GPT2LMHeadModel": "learned positions",
    "FalconForCausalLM": "parallel attention",
    "Cohere2ForCausalLM": "layers without positions",
    "MixtralForCausalLM": "experts",
    "Qwen3MoeForCausalLM": "experts",
    "GptOssForCausalLM": "experts, sinks",
    "Llama4ForCausalLM": "experts, chunks",
    "DeepseekV2ForCausalLM": "latent attention, experts",
    "DeepseekV3ForCausalLM": "latent attention, grouped experts",
    "DeepseekV32ForCausalLM": "sparse latent attention, experts",
    "GlmMoeDsaForCausalLM": "sparse latent attention that layers share, experts",
    "AXK2ForCausalLM": "sparse latent attention with gates, experts",
    "HYV4ForCausalLM": "several residual streams, experts",
    "Mamba2ForCausalLM": "states alone",
    "JambaForCausalLM": "hybrid, experts",
    "Qwen3NextForCausalLM": "hybrid, experts",
    "FalconH1ForCausalLM": "attention beside states",
    "InklingForCausalLM": "attention beside states, experts",
    "T5ForConditionalGeneration": "encoder-decoder",
    "BartForConditionalGeneration": "encoder-decoder",
    "PaliGemmaForConditionalGeneration": "images that see all of themselves",
    "Qwen2VLForConditionalGeneration": "images on several axes",
    "Qwen2AudioForConditionalGeneration": "sounds",
}
"""Architecture -> what is of its kind."""

_SETTINGS: dict[str, Any] = {
    "max_model_len": 128,
    "block_size": 8,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 96,
    "num_threads": 1,
}
_MEDIA_SETTINGS: dict[str, Any] = {"max_model_len": 600, "kv_cache_memory_bytes": 1 << 24, "num_threads": 1}
_PARAMS = (
    SamplingParams(temperature=0, max_tokens=10, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=10, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=7, top_p=0.9, repetition_penalty=1.2, max_tokens=6, logprobs=2),
)


class Written(NamedTuple):
    """A random network, and what it is asked."""

    folder: Path
    prompts: list[RenderedPrompt]
    settings: dict[str, Any]
    """Of engines with it."""


def write_network(folder: Path, architecture: str) -> Written:
    """Write a random network and prepare prompts for it: of several chunks, and with media where it takes them."""
    if architecture not in NETWORKS or not NETWORKS[architecture].startswith(("images", "sounds")):
        case = CASES[architecture]
        write_checkpoint(folder, architecture, dataclasses.replace(case, fields={**case.fields, "vocab_size": 320}))
        write_tokenizer(folder, vocab_size=320)
        lengths = (45, 5, 17)
        prompts = [RenderedPrompt(token_ids=[(7 * i + n) % 290 + 3 for i in range(n)]) for n in lengths]
        reads_whole = NETWORKS.get(architecture) == "encoder-decoder"
        return Written(folder, prompts, _SETTINGS | ({"max_num_batched_tokens": 64} if reads_whole else {}))
    placeholders = MediaModel(folder, architecture).family.placeholders
    prepared = PreparedPrompts(folder)
    media: list[Mapping[str, Any]] = [{"image": [drawing(1)]}, {"image": [drawing(2, (60, 30))]}]
    if "image" not in placeholders:
        media = [{"audio": [tone(3)]}, {"audio": [tone(5, 0.6)]}]
    prompts = [prepared.prompt(f"{placeholders[kind]} so it is", {kind: items}) for each in media
               for kind, items in each.items()]  # fmt: skip
    return Written(folder, [*prompts, prepared.prompt("so it is", {})], _MEDIA_SETTINGS)


def answers(network: Written, dtype: str, layout: Mapping[str, Any]) -> list[Any]:
    """Tokens and log probabilities of all prompts, asked for at once in several ways.

    Raises:
        ConfigError: The layout is refused.
    """
    config = QuireConfig.of(model=str(network.folder), dtype=dtype, **network.settings, **layout)
    requests = [(prompt, params) for params in _PARAMS for prompt in network.prompts]
    with ranks_in_threads():
        return asyncio.run(_answers(config, requests))


async def _answers(config: QuireConfig, requests: Sequence[tuple[RenderedPrompt, SamplingParams]]) -> list[Any]:
    """Requests that run at the same time, dealt out over the engines."""
    client = client_in_threads(config)
    client.start()
    try:
        await client.ready()
        engine, size = AsyncEngine(client), config.data_parallel.data_parallel_size

        async def one(rank: int | None, prompt: RenderedPrompt, params: SamplingParams) -> Any:
            options = RequestOptions(output_kind=OutputKind.FINAL_ONLY, data_parallel_rank=rank)
            (output,) = [each async for each in engine.generate(prompt, params, options)]
            (only,) = output.outputs
            return only.token_ids, [[(each.token_id, each.logprob) for each in at] for at in only.logprobs or ()]

        return await asyncio.gather(
            *(one(at % size if size > 1 else None, *request) for at, request in enumerate(requests))
        )
    finally:
        await client.shutdown()


def outcome(network: Written, dtype: str, layout: Mapping[str, Any], expected: list[Any]) -> str:
    """What a layout gives beside one process: "equal", "refused: ..." or what differs."""
    try:
        found = answers(network, dtype, layout)
    except ConfigError as error:
        return f"refused: {error}"
    if found == expected:
        return "equal"
    if [tokens for tokens, _ in found] != [tokens for tokens, _ in expected]:
        return "OTHER TOKENS"
    return "OTHER BITS"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", nargs="+", default=[""], help="parts of names of architectures")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    options = parser.parse_args(arguments)
    named = [each for each in NETWORKS if any(part in each for part in options.networks)]
    notes: dict[str, None] = {}
    counts: dict[str, int] = {}
    begin = time.monotonic()
    print(f"{'network':<36}{'dtype':<10}" + "".join(f"{name:<14}" for name in options.layouts), flush=True)
    for architecture in named:
        with tempfile.TemporaryDirectory() as scratch:
            network = write_network(Path(scratch), architecture)
            for dtype in options.dtypes:
                expected = answers(network, dtype, {})
                cells = []
                for name in options.layouts:
                    if name == "ep2" and "experts" not in NETWORKS[architecture]:
                        cells.append("-")
                        continue
                    said, _, reason = outcome(network, dtype, LAYOUTS[name], expected).partition(": ")
                    cells.append(said)
                    counts[said] = counts.get(said, 0) + 1
                    if reason:
                        notes[f"{architecture}, {name}: {reason}"] = None
                print(f"{architecture:<36}{dtype:<10}" + "".join(f"{each:<14}" for each in cells), flush=True)
    for note in notes:
        print(note)
    said = ", ".join(f"{number} {name}" for name, number in counts.items())
    print(f"{len(named)} networks, {said}; {time.monotonic() - begin:.0f} s")
    return int(any(name.startswith("OTHER") for name in counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
