"""Settings check their fields; the KV specs count their bytes; the package stays light."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

import quire_interfaces
from quire_interfaces import (
    KV_CACHE_DTYPES,
    ConfigError,
    FullAttentionSpec,
    KVCacheGroup,
    KVCachePlan,
    Settings,
    SlidingWindowSpec,
    at_least,
    between,
    kv_row_bytes,
    one_of,
    setting,
)

README = Path(__file__).resolve().parents[1] / "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(Settings):
    count: int = setting(4, help="How many.", unit="pages", check=at_least(1), flag="--num")
    share: float | None = setting(None, help="How much.", check=between(0, 1))
    mode: str = setting("fast", help="Which way.", check=one_of("fast", "slow"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count must be a .*number of at least 1, got 0"),
        ({"count": True}, "count must be a whole number, got True"),
        ({"count": 1.5}, "count must be a whole number, got 1.5"),
        ({"count": "4"}, "count must be"),
        ({"share": 1.5}, "share must be a number from 0 to 1, got 1.5"),
        ({"mode": "quick"}, "mode must be one of fast, slow, got 'quick'"),
    ],
)
def test_checks_name_field_and_value(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        Example(**values)  # type: ignore[arg-type]
    assert error.value.field == next(iter(values))


def test_none_is_not_checked_and_metadata_is_kept() -> None:
    assert Example().share is None
    (count, *_) = fields(Example)
    assert count.metadata["flag"] == "--num"
    assert count.metadata["unit"] == "pages"


def test_specs_count_bytes_and_blocks() -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_dim=8, dtype="float32")
    assert full.block_bytes == 2 * 16 * 2 * 8 * 4
    assert [full.max_blocks(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    window = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="bfloat16", sliding_window=8)
    # Positions p-7..p lie in at most 3 blocks of 4, however p falls.
    assert max(len({q // 4 for q in range(max(0, p - 7), p + 1)}) for p in range(50)) == window.max_blocks(50) == 3
    group = KVCacheGroup(spec=full, layer_names=("a", "b"))
    plan = KVCachePlan(groups=(group,), num_blocks=10, tensor_block_bytes=(full.block_bytes,) * 2)
    assert plan.total_bytes == 10 * 2 * full.block_bytes


def test_rows_of_every_format_count_their_bytes() -> None:
    bytes_of_20 = {name: kv_row_bytes(name, 20) for name in KV_CACHE_DTYPES}
    assert bytes_of_20 == {
        **{"float32": 80, "bfloat16": 40, "float16": 40, "fp8_e4m3": 20, "fp8_e5m2": 20},
        **{"int8": 20 + 4, "int4": 10 + 4},
    }
    with pytest.raises(ConfigError, match="int4 needs an even head dimension, and this model's is 5"):
        kv_row_bytes("int4", 5)
    with pytest.raises(ConfigError, match="no KV cache dtype 'int2'; choose one of float32, ") as caught:
        kv_row_bytes("int2", 8)
    assert caught.value.field == "kv_cache_dtype"


def test_everything_exported_exists_and_is_sorted() -> None:
    assert all(hasattr(quire_interfaces, name) for name in quire_interfaces.__all__)
    assert len(set(quire_interfaces.__all__)) == len(quire_interfaces.__all__)


def test_imports_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import quire_interfaces; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'quire_interfaces'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_readme_example_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path)
