"""How long a start captures graphs."""

from __future__ import annotations

from quire.config import QuireConfig
from quire.kernel_builds import capture_time_s


def test_ranks_capture_nothing_by_the_clock() -> None:
    assert capture_time_s(QuireConfig.of(cuda_graph_capture_s=7.0)) == 7.0
    assert capture_time_s(QuireConfig.of(tensor_parallel_size=2)) is None
    assert capture_time_s(QuireConfig.of(pipeline_parallel_size=2)) is None
