"""Decode steps of pipeline stages against one process with as many threads as there are stages.

    python apps/bench/benchmarks/pipeline_throughput.py --ranks 2 --batch 8
    python apps/bench/benchmarks/pipeline_throughput.py --ranks 2 --batch 8 --threads 1

As `tensor_parallel_throughput.py`, whose engines, turns and comparison of tokens these are; the time of a step is that
of one token of every request. Stages have the same cores and one step on its way, as they do where `--num-threads` is
not set; with a thread each, two steps are on their way, each with half of the requests. Each step then reads its
stage's weights for itself: where reading weights is all that counts, that takes twice as long.
"""

from __future__ import annotations

from tensor_parallel_throughput import main

if __name__ == "__main__":
    main("pipeline", __doc__, threads=2, batch="8")
