"""Whether outputs follow their JSON schemas: random schemas, several hot samples of each, judged by jsonschema.

    python apps/bench/benchmarks/grammar_schemas.py [--schemas 500] [--samples 20] [--models demo random]

Random schemas with every keyword of draft 2020-12 that the backend follows (`quire_testkit.schemas`) go through `LLM`
with the demo model and with a random one, at a high temperature, every other one without white space. Every sample that
ends must validate, formats included; a random model may go on with the name of a property for longer than it is let,
which is counted apart and may happen to one sample in a thousand. Then come schemas with keywords that the backend does
not know: each must be refused by that name. Exits with 1 when a sample or a refusal is not as it should be, and with 2
when --minutes were over before everything was tried; --first goes on from there.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jsonschema

from quire import LLM, CompletionOutput, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from quire_demo_model import checkpoint_path
from quire_interfaces import FinishReason
from quire_testkit.checkpoints import make_checkpoint
from quire_testkit.schemas import UNSUPPORTED, keywords_of, random_schema

TEMPERATURE = 1.5
MAX_MODEL_LEN = 2048
AT_ONCE = 8
"""Schemas per call."""

Schema = dict[str, Any]


def sample(llm: LLM, schemas: dict[int, Schema], num_samples: int) -> list[RequestOutput]:
    """Samples of each schema; the keys are seeds."""
    params = [
        SamplingParams(
            n=num_samples,
            seed=seed,
            temperature=TEMPERATURE,
            max_tokens=MAX_MODEL_LEN - 64,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=seed % 2 == 1),
        )
        for seed, schema in schemas.items()
    ]
    return llm.generate([f"Example {seed}: " for seed in schemas], params, use_tqdm=False)


def failures(schema: Schema, output: RequestOutput) -> list[str]:
    """What is wrong with the samples that ended: a line each."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    lines = []
    for completion in output.outputs:
        if is_cut(completion):
            continue
        if completion.finish_reason != FinishReason.STOP:
            lines.append(f"{completion.finish_reason} {completion.error}: {completion.text[:200]!r}")
            continue
        try:
            validator.validate(json.loads(completion.text))
        except (ValueError, jsonschema.ValidationError) as error:
            lines.append(f"{str(error).splitlines()[0]}: {completion.text[:200]!r}")
    return lines


def is_cut(completion: CompletionOutput) -> bool:
    """Whether the limit of tokens ended it."""
    return completion.finish_reason == FinishReason.LENGTH


def refused(llm: LLM, num_samples: int) -> tuple[int, list[str]]:
    """How many schemas with unsupported keywords were refused by name, and what is wrong with the others."""
    num_refused, lines = 0, []
    for name, schema in UNSUPPORTED.items():
        try:
            [output] = sample(llm, {0: schema}, num_samples)
        except RequestError as error:
            num_refused += name in str(error)
            lines += [] if name in str(error) else [f"{name}: refused without its name: {error}"]
        else:
            lines += [f"{name}: {line}" for line in failures(schema, output)]
    return num_refused, lines


def run(model: str, llm: LLM, options: argparse.Namespace, end_s: float) -> tuple[int, bool]:
    """Number of failures, and whether everything was tried."""
    counts: collections.Counter[str] = collections.Counter()
    keywords: set[str] = set()
    num_failures, cpu_s, seed, last = 0, time.process_time(), options.first, options.first + options.schemas
    while seed < last and time.monotonic() < end_s:
        schemas = {each: random_schema(each) for each in range(seed, min(seed + AT_ONCE, last))}
        for (number, schema), output in zip(schemas.items(), sample(llm, schemas, options.samples), strict=True):
            wrong = failures(schema, output)
            keywords.update(keywords_of(schema))
            counts += collections.Counter(
                schemas=1,
                samples=len(output.outputs),
                valid=len(output.outputs) - len(wrong) - (num_cut := sum(map(is_cut, output.outputs))),
                cut=num_cut,
                tokens=sum(len(each.token_ids) for each in output.outputs),
            )
            num_failures += len(wrong)
            for line in wrong:
                print(f"{model} {number} {json.dumps(schema)[:600]}\n    {line}", flush=True)
        seed += len(schemas)
        if seed % 80 < AT_ONCE:
            print(f"{model}: {dict(counts)}, {time.process_time() - cpu_s:.0f} s of processor time", flush=True)
    if seed < last:
        print(f"{model}: time is over; go on with --first {seed} --schemas {last - seed}")
        return num_failures, False
    num_refused, lines = refused(llm, options.samples)
    if counts["cut"] > counts["samples"] / 1000:
        lines.append(f"{counts['cut']} of {counts['samples']} samples did not end")
    print("\n".join([f"{model}: {dict(counts)}, keywords and formats: {' '.join(sorted(keywords))}", *lines]))
    print(f"{model}: {num_refused} of {len(UNSUPPORTED)} schemas with other keywords refused by name")
    return num_failures + len(lines), True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--samples", type=int, default=20, help="per schema")
    parser.add_argument("--models", nargs="+", choices=("demo", "random"), default=["demo", "random"])
    parser.add_argument("--first", type=int, default=0, help="seed of the first schema")
    parser.add_argument("--minutes", type=float, default=60, help="most time for all of it")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    end_s = time.monotonic() + 60 * options.minutes
    num_failures, is_complete = 0, True
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models:
            folder = checkpoint_path() if model == "demo" else make_checkpoint(Path(scratch) / "random", like="qwen3")
            with LLM(
                folder, num_threads=options.threads, max_num_seqs=64, max_model_len=MAX_MODEL_LEN,
                num_gpu_blocks_override=8192,
            ) as llm:  # fmt: skip
                found, complete = run(model, llm, options, end_s)
            num_failures, is_complete = num_failures + found, is_complete and complete
    sys.exit(1 if num_failures else 0 if is_complete else 2)


if __name__ == "__main__":
    main()
