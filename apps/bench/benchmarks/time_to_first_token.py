"""Time to the first token of long prompts: computed, computed while the tier stores, and read back after a restart.

    python apps/bench/benchmarks/time_to_first_token.py [--model FOLDER] [--num-tokens 2048] [--prompts 3]

Needs `quire` and `quire-testkit` (for a random checkpoint of the Qwen3 0.6B shape when no model is given). Each case is
a process of its own. Before the last case the files are dropped from the system's page cache; the case before it reads
them from there. Prints seconds, the median of the prompts, and checks that all cases gave the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CASES = {
    "computed, no tier": False,
    "computed, tier stores": True,
    "restart, from the page cache": True,
    "restart, from the disk": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="checkpoint folder; default: random weights")
    parser.add_argument("--num-tokens", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--folder", help="where the tier's files go; default: a temporary folder")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(args.model, args.folder, args.num_tokens, args.prompts, CASES[args.case])))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        tier = Path(folder) / "tier"
        model = args.model or str(random_model(Path(folder) / "model"))
        tokens = []
        for case in CASES:
            if case.endswith("the disk"):
                drop_from_page_cache(tier)
            command = [sys.executable, __file__, "--model", model, "--folder", str(tier), "--case", case]
            command += ["--num-tokens", str(args.num_tokens), "--prompts", str(args.prompts)]
            result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            tokens.append(result.pop("tokens"))
            print(f"{case:<30} {result['median_s']:7.3f} s   {result['seconds']}   cached {result['cached']}")
        num_bytes = sum(path.stat().st_size for path in tier.rglob("*.kv"))
        print(f"{num_bytes / args.prompts / 2**20:.0f} MiB of KV per prompt of {args.num_tokens} tokens")
        assert all(each == tokens[0] for each in tokens), "the tier changed the tokens"


def random_model(folder: Path) -> Path:
    from quire_testkit.checkpoints import make_checkpoint

    return make_checkpoint(folder, like="qwen3", size="0.6b")


def run_case(model: str, tier: str, num_tokens: int, num_prompts: int, has_tier: bool) -> dict[str, object]:
    """Serve the prompts one after the other; seconds to the first token of each."""
    from quire import LLM, OutputKind, RequestOptions, SamplingParams

    settings = {"kv_disk_path": tier} if has_tier else {}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    seconds, tokens, cached = [], [], []
    with LLM(model, max_model_len=num_tokens + 64, max_num_seqs=num_prompts + 1, **settings) as llm:
        llm.generate([[5] * 40], params, use_tqdm=False)  # the first step of a process is slower
        for seed in range(num_prompts):
            prompt = random.Random(seed).choices(range(100, 1000), k=num_tokens)
            start_s = time.perf_counter()
            llm.engine.add_request(prompt, params, RequestOptions(output_kind=OutputKind.DELTA))
            first_s = 0.0
            output_tokens: list[int] = []
            while llm.engine.has_unfinished_requests():
                for output in llm.engine.step():
                    first_s = first_s or time.perf_counter() - start_s
                    output_tokens += output.outputs[0].token_ids
                    num_cached = output.num_cached_tokens
            seconds.append(round(first_s, 3))
            tokens.append(output_tokens)
            cached.append(num_cached)
            time.sleep(1.0)  # the tier writes in the background; its writing is not what is measured
    return {"median_s": statistics.median(seconds), "seconds": seconds, "cached": cached, "tokens": tokens}


def drop_from_page_cache(tier: Path) -> None:
    for path in tier.rglob("*.kv"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


if __name__ == "__main__":
    main()
