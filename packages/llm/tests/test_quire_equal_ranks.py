"""A part of the table of `llm_equal_ranks.py`: networks of several kinds shared in several ways, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm_equal_ranks import LAYOUTS, answers, outcome, write_network


@pytest.mark.parametrize(
    ("architecture", "layouts"),
    [
        ("DeepseekV3ForCausalLM", ("tp2xpp2", "ep2")),
        ("JambaForCausalLM", ("pp2",)),
        # In steps with images layers run one by one, and round as in one call.
        ("PaliGemmaForConditionalGeneration", ("tp2", "pp2", "dp2")),
    ],
)
def test_networks_have_the_bits_of_one_process(architecture: str, layouts: tuple[str, ...], tmp_path: Path) -> None:
    network = write_network(tmp_path, architecture)
    expected = answers(network, "bfloat16", {})
    assert {each: outcome(network, "bfloat16", LAYOUTS[each], expected) for each in layouts} == dict.fromkeys(
        layouts, "equal"
    )


def test_a_difference_is_said(tmp_path: Path) -> None:
    network = write_network(tmp_path, "LlamaForCausalLM")
    expected = answers(network, "float32", {})
    assert outcome(network, "bfloat16", {}, expected) in ("OTHER BITS", "OTHER TOKENS")
    assert outcome(network, "float32", {"pipeline_parallel_size": 9}, expected).startswith("refused: ")
