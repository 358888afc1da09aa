"""`quire list`, `pull`, `rm`, `show` and `collect-env`: models on this machine, and what a report should say."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire_server import cli
from quire_server.terminal.collect_env import shown_variables
from quire_server.terminal.model_commands import age

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, tiny_folder: Path) -> Path:
    """A hub cache with one model in two revisions, which share the tokenizer, and a dataset."""
    repo = tmp_path / "hub" / "models--owner--tiny"
    for commit in (OLD, NEW):
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in tiny_folder.iterdir():
            data = file.read_bytes() + (b" " if commit == NEW and file.name == "config.json" else b"")
            blob = repo / "blobs" / hashlib.sha256(data).hexdigest()
            blob.parent.mkdir(exist_ok=True)
            blob.write_bytes(data)
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(NEW)
    (tmp_path / "hub" / "datasets--owner--data" / "snapshots").mkdir(parents=True)
    return tmp_path / "hub"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


def size_of(cache: Path) -> int:
    return sum(each.stat().st_size for each in cache.glob("models--*/blobs/*"))


def test_list(capsys, cache, tmp_path, tiny_folder):
    models = tmp_path / "models"
    shutil.copytree(tiny_folder, models / "mine")
    where = ("--cache-dir", str(cache), "--models-dir", str(models))
    status, out, _ = run(capsys, "list", *where, "--json")
    assert status == 0
    hub, mine = sorted(json.loads(out), key=lambda each: each["place"] != "hub")
    assert (hub["name"], hub["size_bytes"], hub["has_weights"]) == ("owner/tiny", size_of(cache), True)
    assert sorted(hub["revisions"]) == [OLD, f"{NEW} (main)"]
    size = sum(each.stat().st_size for each in tiny_folder.iterdir())
    assert (mine["name"], mine["size_bytes"], mine["place"]) == ("mine", size, "folder")
    out = run(capsys, "list", *where)[1]
    assert "bbbbbbbb (main)" in out
    assert "just now" in out or "ago" in out
    assert run(capsys, "list", "--models-dir", "/none")[::2] == (2, "quire: --models-dir '/none' is no folder\n")
    assert run(capsys, "list", "--cache-dir", "/none")[0] == 2


def test_rm_frees_what_nothing_else_shares(capsys, cache, monkeypatch):
    where = ("--cache-dir", str(cache))
    before = size_of(cache)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    status, _, err = run(capsys, "rm", "owner/tiny", *where)
    assert (status, size_of(cache)) == (2, before), "nobody can be asked"
    assert "--yes" in err
    assert run(capsys, "rm", "owner/tin", "-y", *where)[2].endswith("did you mean 'owner/tiny'?\n")
    assert run(capsys, "rm", "owner/tiny@cccc", "-y", *where)[0] == 2
    status, out, _ = run(capsys, "rm", "owner/tiny@aaaa", "-y", *where)
    assert status == 0
    assert "1 revision in the hub's cache" in out
    assert 0 < before - size_of(cache) < 10_000, "one config.json; the weights are the other revision's, too"
    assert [each.name for each in cache.glob("*/snapshots/*")] == [NEW]
    assert run(capsys, "rm", "owner/tiny@main", "-y", *where)[0] == 0
    assert not list(cache.glob("models--*"))


def test_rm_of_a_folder(capsys, tmp_path, tiny_folder):
    models = tmp_path / "models"
    shutil.copytree(tiny_folder, models / "mine")
    (models / "linked").symlink_to(tiny_folder)
    status, out, _ = run(capsys, "rm", "mine", "linked", "--yes", "--models-dir", str(models))
    assert status == 0
    assert str(models / "mine") in out
    assert list(models.iterdir()) == []
    assert (tiny_folder / "config.json").exists(), "a link is removed, not what it leads to"


def test_show(capsys, cache, tiny_folder):
    status, out, _ = run(capsys, "show", "owner/tiny", "--cache-dir", str(cache), "--json")
    assert status == 0
    facts = json.loads(out)
    config = json.loads((tiny_folder / "config.json").read_text())
    assert facts["architecture"] == config["architectures"][0]
    assert (facts["vocabulary"], facts["layers"]) == (config["vocab_size"], config["num_hidden_layers"])
    assert facts["size_bytes"] == size_of(cache)
    assert facts["path"].endswith(NEW)
    assert "LlamaForCausalLM" in run(capsys, "show", str(tiny_folder))[1]
    assert "3,607,296" in run(capsys, "show")[1]
    assert "im_start" in run(capsys, "show", "--template")[1]
    assert run(capsys, "show", "no/model", "--cache-dir", str(cache))[0] == 2


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for."""

    folder: Path

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        name = self.path.rpartition("/")[2]
        headers = {"X-Repo-Commit": NEW, "Content-Type": "application/json"}
        if "/resolve/" in self.path and (self.folder / name).is_file():
            data, status = (self.folder / name).read_bytes(), 200
            headers["ETag"] = f'"{hashlib.sha256(data).hexdigest()}"'
        elif self.path.startswith("/api/models/owner/tiny/tree/"):
            files = [(file.name, file.stat().st_size) for file in self.folder.iterdir()]
            entries = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in files]
            data, status = json.dumps(entries).encode(), 200
        elif self.path.startswith("/api/models/owner/tiny"):
            names = [{"rfilename": file.name} for file in self.folder.iterdir()]
            data, status = json.dumps({"id": "owner/tiny", "sha": NEW, "siblings": names}).encode(), 200
        else:
            data, status = b"{}", 404
            headers["X-Error-Code"] = "RepoNotFound"
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def hub(tiny_folder: Path) -> Iterator[str]:
    handler = type("Handler", (_Hub,), {"folder": tiny_folder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_pull(hub, tmp_path, tiny_folder):
    """In a process: the hub's library reads the environment when it is imported."""
    script = (
        "import sys; from quire_server.cli import main; models = sys.argv[1]; "
        "print([int(main(['pull', name, *rest])) for name, *rest in "
        "[('owner/tiny',), ('owner/tiny', '--models-dir', models), ('owner/none',), ('a b',)]])"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    models = tmp_path / "models"
    models.mkdir()
    command = [sys.executable, "-c", script, str(models)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("\n") == 3, done.stderr
    cached, placed, statuses = done.stdout.splitlines()
    assert statuses == "[0, 0, 1, 1]", done.stderr
    assert Path(cached).is_relative_to(tmp_path / "home")
    assert placed == str(models / "tiny")
    for folder in (cached, placed):
        assert (Path(folder) / "model.safetensors").read_bytes() == (tiny_folder / "model.safetensors").read_bytes()
    assert "cannot get model 'owner/none' from the hub" in done.stderr
    assert "'a b' is no folder or GGUF file here, nor the name of a model on the hub" in done.stderr


def test_a_report_hides_secrets(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("QUIRE_API_KEY", "sk-secret")
    monkeypatch.setenv("QUIRE_KV_TIER", "https://me:secret@store/x")
    monkeypatch.setenv("OTHER", "secret")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    status, out, _ = run(capsys, "collect-env", "--json")
    assert status == 0
    sections = json.loads(out)
    variables = sections["environment"]
    assert "secret" not in out
    assert variables["HF_TOKEN"] == "(9 characters, hidden)"
    assert variables["QUIRE_KV_TIER"] == "https://...@store/x"
    assert variables["TOKENIZERS_PARALLELISM"] == "false"
    assert "OTHER" not in variables
    import torch

    assert sections["torch"]["version"] == torch.__version__
    assert "quire-server" in " ".join(sections["Quire"].values())
    assert any(name.startswith("ops on cpu") for name in sections["kernels"])
    assert shown_variables({"VLLM_API_KEY": "x"}) == {"VLLM_API_KEY": "(1 characters, hidden)"}


def test_ages():
    assert [age(seconds) for seconds in (5, 60, 7200, 3 * 86400, 400 * 86400)] == [
        "just now", "1 minute ago", "2 hours ago", "3 days ago", "1 year ago"
    ]  # fmt: skip
