"""Loading: mapped files, shards, dtypes, tied heads, and complaints that list everything."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from models_paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_interfaces import CheckpointError, ConfigError
from quire_models import DecoderLM, ModelConfig, build_model, load_model, load_weights
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint

TOKENS = [5, 9, 200, 31, 7, 7, 7, 100, 250, 3]


def logits_of(model: DecoderLM) -> Tensor:
    driver = PagedDriver(model, block_size=4, shuffle=True)
    seq = driver.add(TOKENS)
    driver.run(seq, 6)
    return torch.stack(seq.logits)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_hf_checkpoint(folder, "llama")
    return folder


def load(folder: Path, **options: object) -> DecoderLM:
    return load_model(ModelConfig.from_path(folder), folder, **options)  # type: ignore[arg-type]


def edited(llama: Path, folder: Path, **tensors: Tensor | None) -> Path:
    """A copy of the checkpoint with tensors replaced, added or (None) removed."""
    shutil.copytree(llama, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors")
    return folder


def test_weights_are_mapped_when_the_dtype_fits(llama: Path) -> None:
    model = load(llama)
    address = model.embedding.part(None).data_ptr()
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(llama / "model.safetensors")):
            begin, end = re.match(r"([0-9a-f]+)-([0-9a-f]+)", line).groups()  # type: ignore[union-attr]
            ranges.append((int(begin, 16), int(end, 16)))
    assert any(begin <= address < end for begin, end in ranges)


def test_shards_equal_one_file(llama: Path, tmp_path: Path) -> None:
    tiny_hf_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    seen: list[tuple[int, int]] = []
    sharded = load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert torch.equal(logits_of(sharded), logits_of(load(llama)))
    assert seen == sorted(seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_precision_equals_the_oracle_in_its_precision(dtype: str, family: str, tmp_path: Path) -> None:
    oracle = tiny_hf_checkpoint(tmp_path, family, dtype=dtype)
    model = load(tmp_path)
    assert model.dtype == getattr(torch, dtype)
    with torch.no_grad():
        exact = oracle.float()(torch.tensor([TOKENS])).logits[0]
    got = logits_of(model)
    assert got.dtype == torch.float32
    # Three layers of rounding; a wrong weight or a lost bias is off by about 1.
    assert (got - exact).abs().max() <= {"bfloat16": 0.05, "float16": 0.006}[dtype] * exact.abs().max()
    widened = load(tmp_path, dtype="float32")
    assert (logits_of(widened) - exact).abs().max() <= 1e-4 * exact.abs().max()


def test_int8_weights_are_close(llama: Path) -> None:
    exact = logits_of(load(llama))
    got = logits_of(load(llama, linear_method="int8"))
    assert 0 < (got - exact).abs().max() <= 0.1 * exact.abs().max()


def test_everything_wrong_is_listed(llama: Path, tmp_path: Path) -> None:
    folder = edited(
        llama,
        tmp_path,
        **{
            "model.norm.weight": None,
            "model.layers.1.mlp.up_proj.weight": None,
            "model.layers.0.self_attn.q_proj.weight": torch.zeros(3, 64),
            "model.layers.7.mlp.up_proj.weight": torch.zeros(1),
            "visual.weight": torch.zeros(1),
        },
    )
    with pytest.raises(CheckpointError) as error:
        load(folder)
    message = str(error.value)
    assert "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "2 not known: model.layers.7.mlp.up_proj.weight, visual.weight" in message
    assert "1 of the wrong shape: model.layers.0.self_attn.q_proj.weight is [3, 64], should be [64, 64]" in message


def test_stored_frequencies_are_ignored(llama: Path, tmp_path: Path) -> None:
    folder = edited(llama, tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert torch.equal(logits_of(load(folder)), logits_of(load(llama)))


def test_tied_checkpoint_may_repeat_the_head(tmp_path: Path) -> None:
    tiny_hf_checkpoint(tmp_path / "tied", "qwen2", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    embedding = load_file(tmp_path / "tied" / "model.safetensors")["model.embed_tokens.weight"]
    folder = edited(tmp_path / "tied", tmp_path / "both", **{"lm_head.weight": embedding.clone()})
    assert torch.equal(logits_of(load(folder)), logits_of(load(tmp_path / "tied")))


def test_integer_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = edited(llama, tmp_path, **{"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match="quantized format"):
        load(folder)


def test_folders_without_usable_weights(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a format that can run code.*save_pretrained"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        load(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 1 files .*model-00001-of-00002"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../secret"}}))
    with pytest.raises(CheckpointError, match=r"names .*secret', which is not a file of this folder"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model(ModelConfig.from_path(llama), tmp_path / "nowhere")


def test_files_under_other_names_are_named(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    parts = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for part in parts:
        shutil.copy(llama / "model.safetensors", tmp_path / part)
    with pytest.raises(CheckpointError, match=rf"index\.json, which says what is in {', '.join(parts)}; get it, too"):
        load(tmp_path)
    for part in parts:
        (tmp_path / part).unlink()
    for name, remedy in (
        ("gptq_model-4bit-128g.safetensors", "if it holds the whole model, rename it to model.safetensors"),
        ("consolidated.safetensors", "get the files that Transformers reads"),
    ):
        shutil.copy(llama / "model.safetensors", tmp_path / name)
        with pytest.raises(CheckpointError, match=f"but {name}; {remedy}"):
            load(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("is_indexed", [False, True])
def test_parts_of_tensor_parallel_ranks_are_refused(llama: Path, tmp_path: Path, is_indexed: bool) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    names = [f"pytorch_model-00000-TP-00{rank}.safetensors" for rank in range(2)]
    for name in names:
        shutil.copy(llama / "model.safetensors", tmp_path / name)
    if is_indexed:
        weight_map = {"model.norm.weight": names[0], "lm_head.weight": names[1]}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"in parts, .*TP-000\.safetensors and others.* each tensor whole"):
        load(tmp_path)


def test_names_without_their_prefix_are_explained(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    tensors = {name.removeprefix("model."): one for name, one in load_file(llama / "model.safetensors").items()}
    for leave_out in ((), ("lm_head.weight",)):
        kept = {name: one for name, one in tensors.items() if name not in leave_out}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(
            CheckpointError, match=r"named without 'model\.' \('embed_tokens.* AutoModelForCausalLM"
        ) as refusal:
            load(tmp_path)
        assert len(str(refusal.value)) < 600


@pytest.mark.parametrize("header", [b"\xff" * 20, b"\x02" + bytes(7) + b"[]", b"\x0a" + bytes(7) + b'{"a": [1]}'])
def test_damaged_headers_are_told_of_by_file(header: bytes, llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(header)
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: .*; download the file again"):
        ModelConfig.from_path(tmp_path)


def test_wrong_choices(llama: Path) -> None:
    for options, message in (
        ({"dtype": "int8"}, "dtype must be auto or one of float32"),
        ({"linear_method": "int3"}, "no quantization 'int3'; choose one of int8"),
        ({"attention_backend": "fast"}, "no attention backend 'fast'"),
        ({"device": "toaster"}, "device"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(llama, **options)


def test_reference_attention_serves_a_network(llama: Path) -> None:
    model = build_model(ModelConfig.from_path(llama), attention_backend="reference")
    load_weights(model, llama)
    exact = logits_of(load(llama))
    assert (logits_of(model) - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_pickled_files_are_taken_when_asked_for(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a format that can run code .* load_format 'pt'"):
        load(tmp_path)
    assert torch.equal(logits_of(load(tmp_path, load_format="pt")), logits_of(load(llama)))
    with pytest.raises(
        ConfigError,
        match=r"load_format must be one of auto, hf, .*, dummy, got 'bin'",
    ):
        load(tmp_path, load_format="bin")


def test_pickled_shards_give_the_same_logits(llama: Path, tmp_path: Path) -> None:
    """Also where the network's own parameters were saved, or views of another order."""
    shutil.copy(llama / "config.json", tmp_path)
    weights = load_file(llama / "model.safetensors")
    shards: list[dict[str, Tensor]] = [{}, {}]
    for index, (name, tensor) in enumerate(sorted(weights.items())):
        shards[index % 2][name] = torch.nn.Parameter(tensor) if index % 3 else tensor.t().contiguous().t()
    weight_map = {}
    for index, shard in enumerate(shards, 1):
        file = f"pytorch_model-{index:05}-of-00002.bin"
        torch.save(shard, tmp_path / file)
        weight_map |= dict.fromkeys(shard, file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"pytorch_model-00001-of-00002\.bin, .* load_format 'pt'"):
        load(tmp_path)
    assert torch.equal(logits_of(load(tmp_path, load_format="pt")), logits_of(load(llama)))
    (tmp_path / file).unlink()
    with pytest.raises(CheckpointError, match=rf"lacks 1 of the 2 files .* {re.escape(file)}"):
        load(tmp_path, load_format="pt")


class Trap:
    """Makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("content", ["code", {"a": 1}, [torch.zeros(2)]], ids=["code", "no tensors", "no names"])
def test_pickled_files_run_no_code(content: object, llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    torch.save(Trap(tmp_path / "trap") if content == "code" else content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="convert the checkpoint to safetensors"):
        load(tmp_path, load_format="pt")
    assert not (tmp_path / "trap").exists()


def test_damaged_pickled_files_are_named(llama: Path, tmp_path: Path) -> None:
    """Whatever the unpickler stumbles over; found by flipping bytes: KeyError, IndexError, TypeError and others."""
    shutil.copy(llama / "config.json", tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save({"model.norm.weight": torch.zeros(2)}, file)
    whole = file.read_bytes()
    start = whole.index(b"\x80\x02", whole.index(b"data.pkl"))  # the pickle's protocol
    damaged = [b"", b"\xff" * 100, whole[:-40]]
    for at in range(start, start + 150):  # "0" drops the last value, "R" calls it
        damaged += [whole[:at] + code + whole[at + 1 :] for code in (b"0", b"R")]
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin|do not fit its config.json"):
            load(tmp_path, load_format="pt")


def test_dummy_weights_need_no_files(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    first, second = (logits_of(load(tmp_path, load_format="dummy")) for _ in range(2))
    assert torch.isfinite(first).all()
    assert first.std() > 0
    assert torch.equal(first, second)
