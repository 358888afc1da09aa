"""Names of ModelScope become folders, by its own client against a server that speaks its protocol on this machine."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import constants
from modelscope_hub import _legacy_api
from modelscope_hub.config import set_default_config

from quire_interfaces import CheckpointError, ConfigError
from quire_models import resolve_model

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "training_args.bin": b"pickle",
    "configuration.py": b"print()",
}


class _Hub(BaseHTTPRequestHandler):
    """Models whose names begin with owner/name, with a branch "master" and a tag "v1"."""

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(place.query).items()}
        known = place.path.startswith("/api/v1/models/owner/name") and query.get("Revision") in ("master", "v1", None)
        if known and place.path.endswith("/repo/files"):
            files = [
                {"Path": name, "Type": "blob", "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self._answer(200, json.dumps({"Code": 200, "Success": True, "Data": {"Files": files}}).encode())
        elif known and place.path.endswith("/repo"):
            self._answer(200, FILES[query["FilePath"]])
        else:
            self._answer(404, json.dumps({"Code": 10010205001, "Success": False, "Message": "no such model"}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The client's empty cache, and the server that it is pointed to."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
    use_endpoint(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    yield tmp_path / "cache"
    set_default_config(None)
    server.shutdown()
    thread.join()
    server.server_close()


def use_endpoint(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the client to an address; it reads its environment once otherwise."""
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", address)
    set_default_config(None)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_what_a_model_needs_is_downloaded(hub: Path) -> None:
    folder = resolve_model("owner/name", modelscope=True)
    assert folder.is_relative_to(hub)
    assert names(folder) == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_pickled_weights_when_asked_for(hub: Path) -> None:
    assert names(resolve_model("owner/name", "v1", modelscope=True, pickled=True)) == {
        "config.json",
        "pytorch_model.bin",
    }


def test_a_name_that_is_not_there(hub: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"'owner/other' at revision 'v1' from ModelScope: HTTPError.*no such model"
    ):
        resolve_model("owner/other", "v1", modelscope=True)


@pytest.mark.parametrize("offline", [True, False], ids=["as set", "unreachable"])
def test_offline_takes_what_is_in_the_cache(offline: bool, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model("owner/name", modelscope=True)
    if offline:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        use_endpoint("http://127.0.0.1:1", monkeypatch)
        monkeypatch.setattr(_legacy_api, "REPO_TREE_PAGE_MAX_ATTEMPTS", 1)  # no pauses between attempts
    assert resolve_model("owner/name", modelscope=True) == folder
    # The server knows this one, so that it was not asked.
    with pytest.raises(CheckpointError, match=r"'owner/name2'.*not in ModelScope's cache.*MODELSCOPE_API_TOKEN"):
        resolve_model("owner/name2", modelscope=True)


def test_no_torch_is_imported(hub: Path) -> None:
    """A server's process has none."""
    program = """
import sys
from quire_models.hub import resolve_model
print(resolve_model("owner/name", modelscope=True), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(resolve_model("owner/name", modelscope=True)), "False"]


def test_a_folder_needs_no_hub(tmp_path: Path) -> None:
    assert resolve_model(tmp_path, modelscope=True) == tmp_path


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub.compat", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire-models\[modelscope\]'") as refusal:
        resolve_model("owner/name", modelscope=True)
    assert refusal.value.field == "use_modelscope"
