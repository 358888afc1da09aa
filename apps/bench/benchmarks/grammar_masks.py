"""What structured output costs per step: computing the masks of constrained rows, and sampling among what they allow.

    python apps/bench/benchmarks/grammar_masks.py [--rows 32] [--vocab 151936]

Each row follows a JSON schema of its own with outputs chosen at random among the allowed tokens that are text a model
would write (letters, digits, punctuation). The cost of masks is what computing them takes, and how much longer it
takes to sample the rows' tokens with them than without, as the engine does it. One thread. Needs quire-testkit,
quire-renderers, quire-sampling and quire-kernels-cpu.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from quire_interfaces import StructuredOutputsParams
from quire_ops import OpRequest, SampleTable, op_table
from quire_renderers import load_tokenizer
from quire_sampling import TokenMasks, apply_token_masks_
from quire_structured_output import OutputMatcher, Vocabulary, make_backend
from quire_testkit.checkpoints import make_checkpoint


def schema(number: int) -> dict[str, object]:
    """A record as applications ask for it."""
    properties = {
        f"name_{number}": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"enum": ["person", "company", "place"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string"}}},
    }
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def report(name: str, values: list[float]) -> None:
    print(f"{name:<44} median {median(values) * 1e3:7.3f} ms   p99 {percentile(values, 0.99) * 1e3:7.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(Path(scratch) / "m", like="qwen3", size="tiny", vocab_size=options.vocab)
        tokenizer = load_tokenizer(folder)
        start = time.perf_counter()
        vocabulary = Vocabulary.from_tokenizer(tokenizer, vocab_size=options.vocab)
        read = time.perf_counter()
        backend = make_backend("auto", vocabulary)
        print(
            f"vocabulary of {options.vocab}: read in {read - start:.2f} s, "
            f"backend in {time.perf_counter() - read:.2f} s"
        )
        compiles: list[float] = []
        matchers = []
        for number in range(options.rows):
            start = time.perf_counter()
            grammar = backend.compile(StructuredOutputsParams(json=schema(number)).spec())
            compiles.append(time.perf_counter() - start)
            matchers.append(OutputMatcher(grammar.new_matcher(), vocabulary.eos_token_ids, None, 32))
        report("compile (with trial walk), per grammar", compiles)
        measure(options, vocabulary, matchers)


def measure(options: argparse.Namespace, vocabulary: Vocabulary, matchers: list[OutputMatcher]) -> None:
    bitmask = torch.zeros(options.rows, -(-options.vocab // 32), dtype=torch.int32)
    words = [memoryview(row) for row in bitmask.numpy()]
    logits = torch.randn(options.rows, options.vocab)
    plain = [i for i, piece in enumerate(vocabulary.tokens) if piece and i not in vocabulary.special_ids]
    rng = random.Random(0)
    sample, sample_masked = (op_table().choose(name, OpRequest()).function for name in ("sample", "sample_masked"))
    table, indices = SampleTable.greedy(options.rows, options.vocab), torch.arange(options.rows)
    plain_times: list[float] = []
    masked_times: list[float] = []
    fills: list[float] = []
    applies: list[float] = []
    accepts: list[float] = []
    rows: list[float] = []
    num_forced = 0
    for _ in range(options.steps):
        start = time.perf_counter()
        for matcher, row in zip(matchers, words, strict=True):
            begin = time.perf_counter()
            matcher.fill_bitmask(row)
            rows.append(time.perf_counter() - begin)
        filled = time.perf_counter()
        sample(logits, indices, indices, table)
        sampled = time.perf_counter()
        sample_masked(logits, indices, indices, table, indices, bitmask)
        masked_times.append(time.perf_counter() - sampled)
        plain_times.append(sampled - filled)
        logits.normal_()
        begin_apply = time.perf_counter()
        apply_token_masks_(logits, TokenMasks(range(options.rows), bitmask))
        applied = time.perf_counter()
        logits.normal_()
        chosen = [pick(rng, matcher, row, plain) for matcher, row in zip(matchers, words, strict=True)]
        num_forced += sum(bool(matcher.forced_token_ids()) for matcher in matchers)
        begin = time.perf_counter()
        for matcher, token_id in zip(matchers, chosen, strict=True):
            if not matcher.is_terminated:
                assert matcher.accept(token_id)
        accepts.append(time.perf_counter() - begin)
        fills.append(filled - start)
        applies.append(applied - begin_apply)
    report(f"masks of {options.rows} rows, per step", fills)
    report("  of one row", rows)
    report(f"sampling {options.rows} tokens without masks", plain_times)
    report("  with masks", masked_times)
    costs = [fill + masked - plain for fill, masked, plain in zip(fills, masked_times, plain_times, strict=True)]
    report("cost of masks: computed, and sampled with", costs)
    report(f"laying {options.rows} masks over float32 logits", applies)
    report(f"going on by {options.rows} tokens", accepts)
    print(f"forced: {num_forced} of {options.steps * options.rows} tokens")


def pick(rng: random.Random, matcher: OutputMatcher, words: memoryview, plain: list[int]) -> int:
    for _ in range(200):
        token_id = rng.choice(plain)
        if words[token_id // 32] >> (token_id % 32) & 1:
            return token_id
    return next(i * 32 + bit for i, word in enumerate(words) if word for bit in range(32) if word >> bit & 1)


if __name__ == "__main__":
    main()
