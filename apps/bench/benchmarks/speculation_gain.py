"""What speculation brings: tokens per second of processor time, by drafter and requests at a time, against none.

    python apps/bench/benchmarks/speculation_gain.py [--methods ngram suffix draft_model eagle3] [--rows 1 8] [--topk 4]

Needs `quire` with compiled kernels and the demo model, whose companions draft. Conversations of a few kinds (chat,
repetition, edits), one engine per method with the controller on and two without speculation, all of them alive,
everything on one thread. A few conversations at a time go through all engines, a step of each in turn. Figures are
processor time without speculation (the mean of both) over that with it: "all" of the sums, trials included, "median" of
the few at a time; "none" is one without speculation over the other, so how far figures can be trusted. The first round,
in which controllers learn, is on its own. --always drafts without a controller.
"""

from __future__ import annotations

import argparse
import statistics
import time

from quire import LLM, SamplingParams

METHODS = ("ngram", "suffix", "draft_model", "eagle3")
QUESTIONS = (
    "What is 17 + 25?",
    "Spell the word basket.",
    "Who are you?",
    "Reverse the word lamp.",
    "What is 90 - 4?",
    "What is a LoRA adapter?",
    "Repeat: the cat sat on the mat, the cat sat on the mat, the cat sat on the mat.",
    "Count from 1 to 20.",
    "What is a prefix cache?",
    "Write the word stone in capitals.",
)


def make_engine(method: str, num_rows: int, *, always: bool, topk: int) -> LLM:
    speculation = {} if method == "none" else {"speculative_method": method, "speculative_adaptive": not always}
    if method == "eagle3":
        speculation["speculative_eagle_topk"] = topk
    return LLM(max_model_len=512, max_num_seqs=num_rows, num_threads=1, num_gpu_blocks_override=1200, **speculation)


def take_turns(engines: dict[str, LLM], prompts: list[list[int]], temperature: float) -> dict[str, float]:
    """Seconds of the processor that each engine takes for the same prompts, as many at a time as it has rows. A step of
    each in turn, so that all of them meet the same neighbours on the machine."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=100)
    for llm in engines.values():
        for prompt in prompts:
            llm.engine.add_request(prompt, params)
    seconds, busy = dict.fromkeys(engines, 0.0), dict(engines)
    while busy:
        for name, llm in list(busy.items()):
            start = time.thread_time()
            llm.engine.step()
            seconds[name] += time.thread_time() - start
            if not llm.engine.has_unfinished_requests():
                del busy[name]
    return seconds


def ratio_of(pairs: list[tuple[float, float]]) -> float:
    """Of the sums: plain, and with speculation."""
    return sum(plain for plain, _ in pairs) / sum(own for _, own in pairs)


def median_of(pairs: list[tuple[float, float]]) -> float:
    """Of the ratios."""
    return statistics.median(plain / own for plain, own in pairs)


def main() -> None:
    """Print a line per method and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--copies", type=int, default=3, help="of the conversations in a round")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--always", action="store_true")
    parser.add_argument("--topk", type=int, default=1, help="of eagle3, which drafts trees above 1")
    args = parser.parse_args()
    for num_rows in args.rows:
        names = ("none", *args.methods, "none again")
        engines = {name: make_engine(name.split()[0], num_rows, always=args.always, topk=args.topk) for name in names}
        plain = engines["none"]
        prompts = [
            list(plain.renderer.render_chat([{"role": "user", "content": question}]).token_ids)
            for question in QUESTIONS * args.copies
        ]
        with make_engine("none", num_rows, always=True, topk=1) as first:  # the process's first steps take longer
            take_turns({"first": first}, prompts[: 2 * num_rows], args.temperature)
        for engine in engines.values():  # what is made when it is first used; a prompt alone teaches no controller
            engine.generate([prompts[0][:8]], SamplingParams(max_tokens=1), use_tqdm=False)
        found: dict[str, list[tuple[float, float]]] = {method: [] for method in args.methods}
        twins: list[tuple[float, float]] = []
        size = min(2 * num_rows, len(prompts))
        first_round = -(-len(prompts) // size)
        for _ in range(args.rounds):
            for start in range(0, len(prompts), size):
                seconds = take_turns(engines, prompts[start : start + size], args.temperature)
                twins.append((seconds["none"], seconds["none again"]))
                for method, pairs in found.items():
                    pairs.append(((seconds["none"] + seconds["none again"]) / 2, seconds[method]))
        rest = f"later: all {ratio_of(twins[first_round:]):.3f}" if twins[first_round:] else ""
        print(f"{num_rows:3d} rows  none         first round {ratio_of(twins[:first_round]):.3f}  {rest}")
        for method, pairs in found.items():
            stats, later = engines[method].stats(), pairs[first_round:]
            rest = f"later: all {ratio_of(later):.3f}, median {median_of(later):.3f}  " if later else ""
            print(
                f"{num_rows:3d} rows  {method:12s} first round {ratio_of(pairs[:first_round]):.3f}  {rest}"
                f"{stats.num_drafts_total} drafts, {stats.num_draft_tokens_total} tokens, "
                f"{stats.num_accepted_tokens_total} accepted, saved {stats.draft_saved_seconds:.2f} s",
                flush=True,
            )
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
