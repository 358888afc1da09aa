"""What speculation brings: tokens per second of processor time, by drafter and requests at a time, against none.

    python packages/spec-decode/benchmarks/gain.py [--methods ngram suffix draft_model eagle3] [--rows 1 8] [--topk 4]

Needs `quire` with compiled kernels and the demo model, whose companions draft. Conversations of a few kinds (chat,
repetition, edits), one engine per method with the controller on, all of them alive, everything on one thread. A few
conversations at a time go through the plain engine, through each other one, and through the plain one again. Figures
are processor time per token without speculation over that with it: "all" of the sums, trials included, "median" of the
few at a time. The first round, in which controllers learn, is on its own. --always drafts without a controller.
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


def seconds_per_token(llm: LLM, prompts: list[list[int]], temperature: float) -> float:
    """Of processor time; all prompts, as many at a time as the engine has rows."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=100)
    for prompt in prompts:
        llm.engine.add_request(prompt, params)
    before, start = llm.stats().num_generation_tokens_total, time.process_time()
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    seconds = time.process_time() - start
    return seconds / (llm.stats().num_generation_tokens_total - before)


def ratio_of(pairs: list[tuple[float, float]]) -> float:
    """Of the sums: plain, and with speculation."""
    return sum(plain for plain, _ in pairs) / sum(own for _, own in pairs)


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
        engines = {
            method: make_engine(method, num_rows, always=args.always, topk=args.topk)
            for method in ("none", *args.methods)
        }
        plain = engines["none"]
        prompts = [
            list(plain.renderer.render_chat([{"role": "user", "content": question}]).token_ids)
            for question in QUESTIONS * args.copies
        ]
        for engine in engines.values():  # what is made when it is first used; a prompt alone teaches no controller
            engine.generate([prompts[0][:8]], SamplingParams(max_tokens=1), use_tqdm=False)
        seconds_per_token(plain, prompts, args.temperature)
        found: dict[str, list[tuple[float, float]]] = {method: [] for method in args.methods}
        size = min(2 * num_rows, len(prompts))
        first_round = -(-len(prompts) // size)
        for _ in range(args.rounds):
            for start in range(0, len(prompts), size):
                few = prompts[start : start + size]
                before = seconds_per_token(plain, few, args.temperature)
                for method, pairs in found.items():
                    own = seconds_per_token(engines[method], few, args.temperature)
                    after = seconds_per_token(plain, few, args.temperature)
                    pairs.append(((before + after) / 2, own))
                    before = after
        for method, pairs in found.items():
            stats, later = engines[method].stats(), pairs[first_round:]
            print(
                f"{num_rows:3d} rows  {method:12s} first round {ratio_of(pairs[:first_round]):.3f}  later: all "
                f"{ratio_of(later):.3f}, median {statistics.median(without / own for without, own in later):.3f}  "
                f"{stats.num_drafts_total} drafts, {stats.num_draft_tokens_total} tokens, "
                f"{stats.num_accepted_tokens_total} accepted, saved {stats.draft_saved_seconds:.2f} s",
                flush=True,
            )
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
