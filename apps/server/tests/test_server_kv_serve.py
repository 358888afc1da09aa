"""`quire kv-serve`: a store for two servers, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire_interfaces import ConfigError
from quire_kv_transfer import RemoteTier, TierStack
from quire_server.kv_serve import read_tenants
from quire_testkit.conformance.block_tier import BLOCK_BYTES, block_key, content

FINGERPRINT = bytes(32)
COMMAND = [sys.executable, "-m", "quire_server.cli", "kv-serve"]


def test_it_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"a": {"key": "secret", "memory": "10MB", "disk": "10MB"}}))
    address = f"unix:{tmp_path}/store"
    command = [*COMMAND, "--listen", address, "--listen", "tcp://127.0.0.1:0"]
    command += ["--tenants", str(tenants), "--disk-path", str(tmp_path / "disk")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[0] == f"block store: {address}\n"
        assert lines[2].startswith("tenant a: ")
        tcp = lines[1].removeprefix("block store: ").strip()
        for place in (address, tcp):
            stack = TierStack([RemoteTier(place, FINGERPRINT, api_key="secret")], FINGERPRINT, [BLOCK_BYTES])
            assert stack.write(block_key(1), content(1))
            data = bytearray(BLOCK_BYTES)
            assert stack.read(block_key(1), [memoryview(data)])
            assert data == content(1)
            stack.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "tcp://0.0.0.0:0"], "asks nobody for a key"),
        (["--listen", "nowhere"], "no address of a block store"),
        (["--listen", "tcp://127.0.0.1:0", "--disk-size", "5MB"], "go together"),
        (["--listen", "tcp://127.0.0.1:0", "--memory", "much"], "must be a size"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], words: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert words in done.stderr + done.stdout


@pytest.mark.parametrize(
    "value", [[], {}, {"a": 1}, {"a": {"key": "k"}}, {"a": {"key": "", "memory": 1}}, {"a": {"key": "k", "memory": -1}}]
)
def test_tenants_that_are_none(tmp_path: Path, value: object) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError):
        read_tenants(path)
