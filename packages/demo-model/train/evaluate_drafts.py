"""How many tokens a step brings when a companion drafts, on held-out conversations, greedy and one at a time.

Run: python packages/demo-model/train/evaluate_drafts.py eagle3 [--tokens 4] [--items 10]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from chat import Chat
from evaluate import TASKS, items

from quire import LLM, SamplingParams
from quire_demo_model import draft_paths

METHODS = {"draft": "draft_model", "eagle3": "eagle3"}


def main() -> None:
    """Print tokens per step for each skill, and for all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("companion", choices=METHODS)
    parser.add_argument("--folder", type=Path, help="of the companion, if it is not the shipped one")
    parser.add_argument("--tokens", type=int, default=5, help="draft tokens a step")
    parser.add_argument("--topk", type=int, default=1, help="guesses that go on at each depth of a tree")
    parser.add_argument("--nodes", type=int, help="draft tokens of a tree")
    parser.add_argument("--items", type=int, default=10, help="held-out conversations a skill")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    args = parser.parse_args()
    folder = args.folder or draft_paths()[METHODS[args.companion]]
    llm = LLM(
        max_num_seqs=1,
        num_threads=1,
        speculative_method=METHODS[args.companion],
        speculative_model=str(folder),
        num_speculative_tokens=args.tokens,
        speculative_eagle_topk=args.topk,
        speculative_num_draft_tokens=args.nodes,
        speculative_adaptive=False,
    )
    chat, params = Chat(), SamplingParams(temperature=0, max_tokens=160)
    before = (0, 0)
    for task in args.tasks:
        for item in items(task, args.items, chat):
            llm.generate(chat.encode(item.prompt), params, use_tqdm=False)
        stats = llm.stats()
        now = (stats.num_drafts_total, stats.num_accepted_tokens_total)
        print(f"{task:<14} {1 + (now[1] - before[1]) / (now[0] - before[0]):.2f}")
        before = now
    print(f"{'all':<14} {1 + before[1] / before[0]:.2f} tokens a step")


if __name__ == "__main__":
    main()
