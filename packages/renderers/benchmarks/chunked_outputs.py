"""Random chunkings of whole, spoilt and truncated outputs of all formats: counts what differs, raises or is lost.

    python packages/renderers/benchmarks/chunked_outputs.py --count 1000000

The tests do the same with fewer; this also gives the speed of the parser.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import time
from pathlib import Path

_TESTS = Path(__file__).parents[1] / "tests" / "test_renderers_chunked_outputs.py"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=20_000, help="chunkings")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    spec = importlib.util.spec_from_file_location("chunked_outputs_tests", _TESTS)
    assert spec is not None
    assert spec.loader is not None
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    rng = random.Random(args.seed)
    names = list(tests.FORMATS)
    done = num_chars = wrong = lost = 0
    start = time.process_time()
    while done < args.count:
        tool, reasoning = pair = rng.choice(names)
        corpus = [*tests.OUTPUTS[tool], *tests.THOUGHTS["gpt_oss" if reasoning == "gpt_oss" else "qwen3"]]
        text = tests.spoil(tests.with_sentinels(rng.choice(corpus), rng), rng, tests.MARKERS[pair])
        whole = tests.parse(tests.FORMATS[pair], [text])
        tests.check_well_formed(whole)
        message = tests.fold_events(whole)
        calls = (f"{call.name} {call.arguments} {call.id}" for call in message.calls)
        found = " ".join((message.text, message.reasoning, *calls))
        missing = set(tests.SENTINEL.findall(text)) - set(tests.SENTINEL.findall(found))
        if missing:
            lost += 1
            print("lost", pair, missing, repr(text))
        for _ in range(10):
            pieces = tests.cut(text, rng)
            num_chars += len(text)
            done += 1
            if tests.parse(tests.FORMATS[pair], pieces) != whole:
                wrong += 1
                print("differs", pair, pieces)
    seconds = time.process_time() - start
    print(f"{done} chunkings, {wrong} differ, {lost} outputs lost text, none raised; {seconds:.0f} s of processor time")


if __name__ == "__main__":
    main()
