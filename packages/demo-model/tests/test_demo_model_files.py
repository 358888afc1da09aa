"""The package's files: small, complete, as listed in the manifest, and readable by the standard library alone."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys

import quire_demo_model

CHECKPOINT = quire_demo_model.checkpoint_path()
FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def _header() -> dict[str, dict[str, object]]:
    with (CHECKPOINT / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, dict[str, object]] = json.loads(file.read(size))
    header.pop("__metadata__")
    return header


def test_exported_names() -> None:
    assert quire_demo_model.__all__ == [
        "__version__",
        "adapter_paths",
        "checkpoint_path",
        "draft_paths",
        "vision_paths",
    ]
    assert quire_demo_model.__version__ == "0.1.0"


def test_every_file_has_the_listed_hash() -> None:
    listed = dict(line.split("  ")[::-1] for line in (CHECKPOINT / "SHA256SUMS").read_text().splitlines())
    assert set(listed) == FILES
    for name, digest in listed.items():
        assert hashlib.sha256((CHECKPOINT / name).read_bytes()).hexdigest() == digest, name


def test_small_enough_for_the_repository() -> None:
    assert {path.name for path in CHECKPOINT.iterdir()} == FILES | {"SHA256SUMS"}
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 12_000_000


def test_adapters_are_complete_and_small() -> None:
    paths = quire_demo_model.adapter_paths()
    assert list(paths) == ["demo-capitals", "demo-json"]
    for path in paths.values():
        assert {file.name for file in path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        assert sum(file.stat().st_size for file in path.iterdir()) <= 2_000_000
        assert json.loads((path / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_weights_fit_the_configuration() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    header = _header()
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    expected = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "input_layernorm": [hidden],
            "self_attn.q_proj": [q_size, hidden],
            "self_attn.k_proj": [kv_size, hidden],
            "self_attn.v_proj": [kv_size, hidden],
            "self_attn.o_proj": [hidden, q_size],
            "post_attention_layernorm": [hidden],
            "mlp.gate_proj": [inner, hidden],
            "mlp.up_proj": [inner, hidden],
            "mlp.down_proj": [hidden, inner],
        }
        expected |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    assert {name: entry["shape"] for name, entry in header.items()} == expected
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    num_parameters = sum(_size(entry["shape"]) for entry in header.values())
    assert 2_000_000 <= num_parameters <= 5_000_000


def _size(shape: object) -> int:
    assert isinstance(shape, list)
    size = 1
    for length in shape:
        size *= length
    return size


def test_what_drafts_is_small_and_as_listed() -> None:
    for folder in quire_demo_model.draft_paths().values():
        listed = dict(line.split("  ")[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
        assert (
            set(listed) == {"config.json", "model.safetensors"} == {p.name for p in folder.iterdir()} - {"SHA256SUMS"}
        )
        for name, digest in listed.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
        assert sum(path.stat().st_size for path in folder.iterdir()) < 2_000_000


def test_import_needs_the_standard_library_only() -> None:
    code = (
        "import sys, quire_demo_model; quire_demo_model.checkpoint_path(); "
        "tops = {name.partition('.')[0] for name in sys.modules}; "
        "print([m for m in ('torch', 'numpy', 'jinja2', 'tokenizers', 'safetensors', 'transformers') if m in tops])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
