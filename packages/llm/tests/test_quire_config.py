"""The settings tree: names, sources, conversions, errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import QuireConfig, build_sections
from quire.setting_fields import DERIVED, config_fields
from quire.setting_text import parse_text
from quire_interfaces import ConfigError

SECTIONS = QuireConfig.sections()
FIELDS = config_fields(SECTIONS)


def test_later_sources_win_and_are_remembered() -> None:
    sources = [("file", {"max_num_seqs": 8, "block_size": 32}), ("command line", {"--max-num-seqs": "4"})]
    built, origins = build_sections(SECTIONS, sources)
    config = QuireConfig(**built)  # type: ignore[arg-type]
    assert config.scheduler.max_num_seqs == 4
    assert config.kv_cache.block_size == 32
    assert origins["max_num_seqs"] == (4, "command line")
    assert origins["block_size"] == (32, "file")
    assert origins["dtype"] == ("auto", "default")


def test_one_flag_fills_every_owner() -> None:
    assert {section for section, _ in FIELDS["max_model_len"].owners} == {"model", "scheduler"}
    config = QuireConfig.of(max_model_len=777)
    assert config.model.max_model_len == config.scheduler.max_model_len == 777


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("max_num_seq", "max_num_seqs"), ("blocksize", "block_size"), ("--max-modellen", "max_model_len")],
)
def test_unknown_name_tells_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{nearest}'") as caught:
        QuireConfig.of(**{name: 1})
    assert len(str(caught.value)) < 200


def test_names_that_are_about_as_near_are_all_told() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'kv_disk_size' or 'kv_disk_path'\?"):
        QuireConfig.of(kv_disk=1)


def test_bad_value_names_the_field() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs must be a whole number of at least 1, got 0"):
        QuireConfig.of(max_num_seqs=0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096), ("4k", 4000), ("4K", 4096), ("4Ki", 4096), ("1.5k", 1500), ("2M", 2 << 20), ("128K", 131072),
        ("8G", 8 << 30), ("8GiB", 8 << 30), ("8gib", 8 << 30), ("8 GB", 8 * 10**9), ("8gb", 8 * 10**9),
        ("512m", 512 * 10**6),
        ("1e9", 10**9), ("1E3k", 10**6), (" 7 ", 7), ("1_000", 1000), ("0.5T", 1 << 39), ("100B", 100), ("+3", 3),
        ("9007199254740993k", 9007199254740993000),
    ],
)  # fmt: skip
def test_whole_numbers_take_suffixes(text: str, value: int) -> None:
    assert parse_text(FIELDS["max_num_seqs"], text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "1.2", "four", "1.0001k", "0x10", "1e", "1e9999", "8 G B", "8Q", "inf", "nan", "1,000"]
)
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--max-num-seqs expects a whole number of requests, such as .*8GiB .* got"):
        parse_text(FIELDS["max_num_seqs"], text)


def test_lists_of_numbers_are_numbers() -> None:
    for sizes in (["1", "2k"], "1,2k", [1, 2000], ("1", 2000)):
        assert QuireConfig.of(cuda_graph_sizes=sizes).runner.cuda_graph_sizes == (1, 2000)
    with pytest.raises(ConfigError, match=r"--cuda-graph-sizes expects a whole number of tokens, .* got 'x'"):
        QuireConfig.of(cuda_graph_sizes=["1", "x"])


def test_optional_fields_take_none() -> None:
    assert parse_text(FIELDS["max_model_len"], "none") is None
    assert parse_text(FIELDS["enable_prefix_caching"], "false") is False


def test_every_field_explains_itself() -> None:
    for section, owner in SECTIONS.items():
        for name, spec in config_fields({section: owner}).items():
            assert spec.help.endswith("."), f"{section}.{name} has no help"
            assert spec.flag.startswith("--")


def test_derived_fields_exist_and_are_not_offered() -> None:
    for section, name in DERIVED:
        assert name in SECTIONS[section].__dataclass_fields__
        assert (section, name) not in [owner for spec in FIELDS.values() for owner in spec.owners]


@given(
    st.builds(
        QuireConfig.of,
        max_num_seqs=st.integers(1, 9999),
        block_size=st.sampled_from([1, 8, 16, 32, 64, 128, 256]),
        dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
        max_model_len=st.none() | st.integers(2, 10**6),
    )
)
def test_plain_data_round_trip(config: QuireConfig) -> None:
    assert QuireConfig.from_dict(config.to_dict()) == config


def test_vllms_speculative_config() -> None:
    made = QuireConfig.of(speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 5})
    assert (
        made.speculative
        == QuireConfig.of(speculative_method="ngram", num_speculative_tokens=2, prompt_lookup_max=5).speculative
    )
    drafted = QuireConfig.of(speculative_config={"model": "some/draft", "num_speculative_tokens": 2}).speculative
    assert (drafted.method, drafted.model) == ("draft_model", "some/draft")
    assert QuireConfig.of(speculative_config=None) == QuireConfig()
    assert QuireConfig.of(tensor_parallel_size=1, disable_log_stats=True) == QuireConfig()
    for wrong, words in (
        ({"speculative_config": 5}, "must be a JSON object"),
        ({"speculative_config": {"methd": "ngram"}}, "did you mean"),
        (
            {"prefill_context_parallel_size": 2},
            r"prefill_context_parallel_size=2 \(argument\) is not supported: .*start a server for each host or device",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            QuireConfig.of(**wrong)
