"""Names become folders: local ones as they are, hub names from the cache, and a remedy when neither can be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import COMMIT, hub_of

from quire_interfaces import CheckpointError
from quire_models import resolve_model


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match="is local, which has no revision 'main'"):
        resolve_model(tmp_path, "main")


def test_names_that_are_neither(tmp_path: Path) -> None:
    for name in ("/no/such/folder", "./models/x", "a/b/c", "", "owner/", "bad name/x"):
        with pytest.raises(CheckpointError, match="no folder or GGUF file here, nor the name of a model"):
            resolve_model(name)


def test_offline_says_what_to_do(offline: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'owner/name' at revision 'v1'.*cannot be reached.*pass its folder"):
        resolve_model("owner/name", "v1")


def test_cached_model_needs_no_network(offline: Path) -> None:
    snapshot = offline / "models--owner--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = offline / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    assert resolve_model("owner/name") == snapshot


@pytest.mark.parametrize("mistral", [False, True])
def test_weights_in_two_formats_are_downloaded_once(mistral: bool, tmp_path: Path) -> None:
    """Mistral AI's repositories have the same weights for Transformers and in their own format."""
    root = tmp_path / "root"
    root.mkdir()
    index, own = "model.safetensors.index.json", "consolidated.safetensors"
    for name in ("config.json", "params.json", index, "model-00001-of-00001.safetensors", own):
        (root / name).write_text("{}")
    code = (
        "import sys; from quire_models import resolve_model\n"
        "try: resolve_model('owner/name', mistral=bool(sys.argv[1]))\n"
        "except Exception as error: print(error)\n"  # params.json says nothing
    )
    with hub_of(root) as endpoint:
        environment = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hub")}
        command = [sys.executable, "-c", code, "yes" if mistral else ""]
        subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=True)
    expected = {own} if mistral else {"model-00001-of-00001.safetensors"}
    assert {file.name for file in (tmp_path / "hub").rglob("*.safetensors")} == expected
