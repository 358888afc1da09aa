"""Which GGUF file a name means: beside other files in a folder, and in repositories on the hub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import COMMIT, hub_of
from models_gguf_small import write

from quire_interfaces import CheckpointError
from quire_models import resolve_model
from quire_models.gguf.choice import model_files, quantization_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No network, and a cache of the hub's client that is filled by hand."""
    from huggingface_hub import constants

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def repository(cache: Path, *names: str) -> Path:
    """The snapshot of a repository with these files, as the client keeps it: links to blobs."""
    snapshot = cache / "models--owner--name" / "snapshots" / COMMIT
    blobs = cache / "models--owner--name" / "blobs"
    for folder in (snapshot, blobs, cache / "models--owner--name" / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (cache / "models--owner--name" / "refs" / "main").write_text(COMMIT)
    for number, name in enumerate(names):
        if name.endswith(".gguf"):
            write(blobs / str(number), {"general.name": name})
        else:
            (blobs / str(number)).write_text("{}")
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).symlink_to(blobs / str(number))
    return snapshot


def file_of(folder: Path) -> str:
    return (folder / "model.gguf").readlink().name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M"),
        ("phi-2.Q8_0.gguf", "Q8_0"),
        ("Qwen3-30B-A3B-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("BF16/model-00001-of-00003.gguf", "BF16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model-f16.gguf", "F16"),
        ("model.gguf", ""),
    ],
)
def test_quantizations_are_read_from_names(name, expected):
    assert quantization_of(name) == expected


def test_files_that_are_no_models_and_later_parts_do_not_count():
    names = ["mmproj-F16.gguf", "imatrix.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "README.md"]
    assert model_files(names) == ["a-00001-of-00002.gguf"]


def test_a_file_beside_a_config_json_is_the_model(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "x-Q8_0.gguf")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    made = resolve_model(folder)
    assert file_of(made) == "x-Q8_0.gguf"
    assert resolve_model(made) == made  # which has a config.json beside a link to the file
    write(folder / "mmproj-x.gguf")
    assert resolve_model(folder) == made
    write(folder / "x-Q4_0.gguf")
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files; .*: x-Q4_0\.gguf, x-Q8_0\.gguf"):
        resolve_model(folder)
    assert file_of(resolve_model(f"{folder}:Q4_0")) == "x-Q4_0.gguf"
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve_model(folder) == folder


def test_a_folder_of_a_folder_for_each_quantization(tmp_path):
    for kind in ("Q4_0", "Q8_0"):
        (tmp_path / "copy" / kind).mkdir(parents=True)
        write(tmp_path / "copy" / kind / f"x-{kind}.gguf")
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files; .*: Q4_0/x-Q4_0\.gguf, Q8_0/x-Q8_0\.gguf"):
        resolve_model(tmp_path / "copy")
    assert file_of(resolve_model(f"{tmp_path / 'copy'}:q8_0")) == "x-Q8_0.gguf"


def test_a_repository_with_one_file_needs_no_quantization(cache):
    repository(cache, "README.md", "config.json", "mmproj-F16.gguf", "x-Q4_K_M.gguf")
    assert file_of(resolve_model("owner/name")) == "x-Q4_K_M.gguf"
    assert file_of(resolve_model("owner/name:Q4_K_M")) == "x-Q4_K_M.gguf"


def test_a_repository_with_weights_of_another_form_is_that(cache):
    snapshot = repository(cache, "config.json", "model.safetensors", "x-Q4_K_M.gguf")
    assert resolve_model("owner/name") == snapshot
    assert file_of(resolve_model("owner/name:Q4_K_M")) == "x-Q4_K_M.gguf"


def test_several_quantizations_want_one_named(cache):
    repository(cache, "x-Q4_K_M.gguf", "x-Q8_0.gguf", "x-UD-Q2_K_XL.gguf")
    for name, message in (
        ("owner/name", r"owner/name has 3 GGUF files: Q4_K_M, Q8_0, UD-Q2_K_XL; name one, .* owner/name:Q4_K_M"),
        ("owner/name:Q6_K", r"owner/name has 3 GGUF files, and none of 'Q6_K': Q4_K_M, Q8_0, UD-Q2_K_XL; name one"),
        ("owner/name:Q4", r"none of 'Q4'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            resolve_model(name)
    for tag, file in (
        ("Q8_0", "x-Q8_0"), ("q8_0", "x-Q8_0"), ("Q2_K_XL", "x-UD-Q2_K_XL"), ("UD-Q2_K_XL", "x-UD-Q2_K_XL"),
        ("x-Q4_K_M.gguf", "x-Q4_K_M"), ("x-Q4_K_M", "x-Q4_K_M"),
    ):  # fmt: skip
        assert file_of(resolve_model(f"owner/name:{tag}")) == f"{file}.gguf"


def test_two_files_of_one_quantization_want_the_file_named(cache):
    repository(cache, "a-Q8_0.gguf", "b-Q8_0.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files that this may mean: a-Q8_0.gguf, b-Q8_0.gguf; .*:a-Q8_0"):
        resolve_model("owner/name:Q8_0")
    assert file_of(resolve_model("owner/name:b-Q8_0.gguf")) == "b-Q8_0.gguf"


def test_parts_in_folders_are_one_file(cache, tmp_path):
    parts = [f"Q8_0/x-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    snapshot = repository(cache, *parts, "Q4_0/x.gguf")
    with pytest.raises(CheckpointError, match="GGUF files: Q4_0, Q8_0; name one"):
        resolve_model("owner/name")
    assert file_of(resolve_model("owner/name:Q8_0")) == "x-00001-of-00003.gguf"
    shutil.rmtree(tmp_path / "cache")
    (snapshot / parts[0]).unlink()
    with pytest.raises(CheckpointError, match=r"lacks x-00001-of-00003.gguf; download all parts"):
        resolve_model("owner/name:Q8_0")


def test_a_repository_that_is_not_here_says_what_to_do(cache):
    with pytest.raises(CheckpointError, match=r"cannot get model 'owner/other'.*Check the name and the network"):
        resolve_model("owner/other:Q8_0")
    with pytest.raises(CheckpointError, match="no folder or GGUF file here, nor the name of a model on the hub"):
        resolve_model("./owner/other:Q8_0")
    with pytest.raises(CheckpointError, match="Hugging Face's hub only; download the file"):
        resolve_model("owner/other:Q8_0", modelscope=True)


def test_only_the_named_file_is_downloaded_and_then_needs_no_network(tmp_path):
    root = tmp_path / "root"
    (root / "Q8_0").mkdir(parents=True)
    for name in ("x-Q4_0.gguf", "Q8_0/x-Q8_0.gguf"):
        write(root / name)
    code = (
        "import sys, os; from quire_models import resolve_model\n"
        "try: print(os.readlink(resolve_model(sys.argv[1]) / 'model.gguf'))\n"
        "except Exception as error: print(error)\n"
    )

    def resolved(name: str, **environment: str) -> str:
        more = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
        command = [sys.executable, "-c", code, name]
        done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    with hub_of(root) as endpoint:
        there = {"HF_ENDPOINT": endpoint}
        assert "owner/name has 2 GGUF files: Q4_0, Q8_0; name one" in resolved("owner/name", **there)
        found = resolved("owner/name:Q8_0", **there)
        assert found.endswith(f"snapshots/{COMMIT}/Q8_0/x-Q8_0.gguf")
        assert "cannot get model 'owner/other' from the hub" in resolved("owner/other:Q8_0", **there)
    assert not list((tmp_path / "hub").rglob("x-Q4_0.gguf"))
    assert resolved("owner/name:Q8_0", HF_HUB_OFFLINE="1") == resolved("owner/name", HF_HUB_OFFLINE="1") == found
