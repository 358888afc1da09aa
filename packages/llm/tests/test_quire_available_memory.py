"""What control groups leave of the memory, in both of their versions."""

from __future__ import annotations

from pathlib import Path

from quire.available_memory import control_group_bytes

GIB = 1 << 30


def write_group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_the_tightest_group_around_counts(tmp_path: Path) -> None:
    write_group(tmp_path, memory__max="max", memory__current=5 * GIB)
    write_group(
        tmp_path / "a", memory__max=8 * GIB, memory__current=6 * GIB, memory__stat=f"anon 1\ninactive_file {GIB}"
    )
    write_group(tmp_path / "a" / "b", memory__max=4 * GIB, memory__current=1 * GIB)
    membership = tmp_path / "membership"
    membership.write_text("0::/a/b\n")
    assert sorted(control_group_bytes(tmp_path, membership)) == [3 * GIB, 3 * GIB]
    membership.write_text("0::/a\n")
    assert control_group_bytes(tmp_path, membership) == [3 * GIB]


def test_a_container_sees_its_own_group_as_the_mount(tmp_path: Path) -> None:
    write_group(tmp_path, memory__max=2 * GIB, memory__current=GIB // 2)
    membership = tmp_path / "membership"
    membership.write_text("0::/../../not/mounted/here\n")
    assert control_group_bytes(tmp_path, membership) == [2 * GIB - GIB // 2]
    assert control_group_bytes(tmp_path, tmp_path / "nothing") == [2 * GIB - GIB // 2]


def test_version_1(tmp_path: Path) -> None:
    files = {"memory__usage_in_bytes": 3 * GIB, "memory__stat": f"cache 1\ninactive_file 5\ntotal_inactive_file {GIB}"}
    write_group(tmp_path / "memory", memory__limit_in_bytes=9223372036854771712, **files)
    write_group(tmp_path / "memory" / "job", memory__limit_in_bytes=4 * GIB, **files)
    membership = tmp_path / "membership"
    membership.write_text("9:name=systemd:/\n4:cpu,memory:/job\n1:cpu:/\n0::/\n")
    assert control_group_bytes(tmp_path, membership) == [2 * GIB]


def test_nothing_is_limited_where_nothing_says_so(tmp_path: Path) -> None:
    assert control_group_bytes(tmp_path, tmp_path / "nothing") == []
