"""Settings of vLLM's that are none of Quire's: accepted where they ask for what is so anyway, else answered."""

from __future__ import annotations

import pytest

from quire.config import QuireConfig, build_sections
from quire.vllm_settings import is_settled
from quire_interfaces import ConfigError

SECTIONS = QuireConfig.sections()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "prefill_context_parallel_size",
            "2",
            "--prefill-context-parallel-size 2 is not supported: the ranks of a model are processes of one host",
        ),
        ("enable_dbo", True, "--enable-dbo is not supported: the ranks"),
        (
            "collect_detailed_traces",
            ("model", "worker"),
            "--collect-detailed-traces model worker is not supported: traces",
        ),
        ("tool_server", "demo", "use --mcp-servers"),
    ],
)
def test_a_feature_that_is_not_there_is_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_sections(SECTIONS, [("command line", {name: value})])
    assert words in str(caught.value)


def test_other_sources_are_spelled_as_they_are() -> None:
    with pytest.raises(ConfigError, match=r"prefill_context_parallel_size=2 \(vllm.yaml\) is not supported"):
        build_sections(SECTIONS, [("vllm.yaml", {"prefill-context-parallel-size": 2})])


def test_numbers_and_lists_are_compared_by_value() -> None:
    for value in (0, 0.0, "0.0", "0"):
        assert is_settled("cpu_offload_gb", value)
    assert is_settled("cpu_offload_params", [])
    with pytest.raises(ConfigError):
        is_settled("cpu_offload_gb", "4")


def test_what_has_no_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert is_settled("safetensors_load_strategy", "eager")
    assert is_settled("swap_space", "4")
    assert [record.getMessage().partition(":")[2].partition(":")[0] for record in caplog.records] == [
        " safetensors_load_strategy has no effect", " swap_space has no effect",
    ]  # fmt: skip
    caplog.clear()
    assert is_settled("swap_space", None)
    assert not caplog.records


def test_other_spellings_hold_in_every_source() -> None:
    built, _ = build_sections(
        SECTIONS, [("file", {"spec_tokens": 3, "spec-method": "ngram", "max_num_queued_reqs": 7})]
    )
    assert built["speculative"].num_speculative_tokens == 3
    assert built["speculative"].method == "ngram"
    assert built["engine"].max_requests_in_flight == 7
