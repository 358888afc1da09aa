"""GGUF files against Transformers with the weights that the package gguf says are in them."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from models_gguf_writer import blocks, write_gguf
from models_paged_driver import PagedDriver
from safetensors.torch import save_file
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_models import DecoderLM, ModelConfig, load_model, resolve_model
from quire_models.checkpoint_files import open_checkpoint
from quire_models.draft_heads.eagle import EagleHead
from quire_models.draft_heads.eagle_config import read_eagle_config
from quire_models.gguf.grids import grid_of
from quire_models.gguf.header import BLOCKS, read_header
from quire_models.ledger import weight_ledger
from quire_models.mixer_spec import LatentSelfAttentionSpec
from quire_models.quantization_config import BLOCK_BYTES
from quire_ops import OpRequest, is_in_blocks, op_table, ops
from quire_quantization.ggml import GGML_TYPES, read_ggml

TOKENS = [5, 9, 200, 31, 7, 7, 7, 100, 250, 3]
WIDENED = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0")
EVERY = ("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "MXFP4", "Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
EVERY += (*WIDENED, "F32", "F16", "BF16")
SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-6, "num_hidden_layers": 3,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek2": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False}),
    "deepseek2 one by one": (
        "DeepseekV3",
        {
            **LATENT, "q_lora_rank": 32, "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.8,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama wide": ("Llama", {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}),
    "llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            }
        },
    ),
    "llama linear": (
        "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "attention_factor": 0.7, "beta_fast": 16.0,
                "beta_slow": 2.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama divisors": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "factor": 1.0, "attention_factor": 1.0,
                "long_factor": [1.0, 1.0, 1.5, 2.0, 3.0, 3.5, 4.0, 9.0], "original_max_position_embeddings": 256,
                "short_factor": [1.0, 1.0, 1.5, 2.0, 3.0, 3.5, 4.0, 9.0],
            }
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 6}),
    "mixtral": ("Mixtral", {"num_local_experts": 6}),
    "mixtral one by one": ("Mixtral", {"num_local_experts": 6}),
    "qwen2moe": (
        "Qwen2Moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "qkv_bias": True,
                     "shared_expert_intermediate_size": 96},
    ),
    "qwen3moe": ("Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
                              "norm_topk_prob": True}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 6,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 64,
            },
        },
    ),
    "gemma3": (
        "Gemma3",
        {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 6, "sliding_window_pattern": 2},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_model(name: str, **more: Any) -> Any:
    import transformers

    prefix, fields = FAMILIES[name]
    torch.manual_seed(3)
    suffix = "TextConfig" if prefix == "Gemma3" else "Config"
    config = getattr(transformers, f"{prefix}{suffix}")(**{**SHAPE, **fields, **more})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval().requires_grad_(requires_grad=False)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases that are not the trivial ones
            parameter.add_(torch.rand_like(parameter) * 0.2)
    return model


def logits_of(model: DecoderLM, tokens: list[int]) -> Tensor:
    driver = PagedDriver(model, block_size=4, shuffle=True)
    sequence = driver.add(tokens)
    while len(sequence.logits) < len(tokens):
        driver.run(sequence, min(7, len(tokens) - len(sequence.logits)))
    return torch.stack(sequence.logits)


def check_parity(file: Path, oracle: Any) -> Any:
    """The network in bfloat16."""
    folder = resolve_model(file)
    config = ModelConfig.from_path(folder)
    with torch.no_grad():
        tokens = oracle.generate(torch.tensor([TOKENS]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        expected = oracle(tokens).logits[0]
    got = logits_of(load_model(config, folder, dtype="float32"), tokens[0].tolist())
    assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()
    assert torch.equal(got.argmax(1)[len(TOKENS) - 1 : -1], tokens[0, len(TOKENS) :])
    rounded = load_model(config, folder, dtype="bfloat16")
    errors = (logits_of(rounded, tokens[0].tolist()) - expected).abs().amax(1)
    # A token for which two experts are all but equally probable may get the other one.
    error = errors.median() if rounded.expert_methods else errors.max()
    assert error <= 0.08 * expected.abs().max()
    return rounded


def check_plan(network: Any) -> None:
    """The planner's bytes of linear layers are those in memory."""
    linears = [each for each in network.linears if each._weights]
    layers = [layer.stack_weights() for layer in linears]  # without those that latent attention has taken apart
    served = op_table().choose(ops.block_linear, OpRequest(dtype=torch.bfloat16)).name != "reference"
    ledger = weight_ledger(network.config, "bfloat16", in_blocks=frozenset(BLOCK_BYTES if served else ()))
    headers = [layer.scale for layer in layers if layer is not None and is_in_blocks(layer)]
    assert bool(headers) <= served
    kept = sum(t.nbytes for layer in layers if layer is not None for t in layer if isinstance(t, Tensor))
    kept -= sum(header.nbytes for header in headers)  # of one size, however large a layer is
    mixers = [mixer for layer in network.config.network.layers for mixer in layer.mixers]
    for mixer in mixers:
        if isinstance(mixer, LatentSelfAttentionSpec):  # its up-projections, absorbed, in bfloat16
            kept += 2 * mixer.num_heads * (mixer.qk_nope_head_dim + mixer.v_head_dim) * mixer.kv_lora_rank
    assert ledger["attention"] + ledger["MLP"] + ledger.get("experts", 0) == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "Q8_0"), ("llama tied", "Q4_0"), ("llama3", "F16"), ("llama linear", "Q8_0"),
        ("llama yarn", "Q8_0"), ("llama divisors", "Q8_0"), ("qwen2", "Q4_0"), ("qwen3", "Q8_0"),
        ("gemma", "Q8_0"), ("gemma2", "BF16"), ("gemma3", "Q5_0"),
        ("mixtral", "Q4_0"), ("mixtral one by one", "Q8_0"),
        ("qwen2moe", "Q8_0"), ("qwen3moe", "Q4_1"), ("gpt-oss", "MXFP4"), ("llama wide", "Q4_K"),
        ("deepseek2", "Q8_0"), ("deepseek2 one by one", "Q5_0"),
    ],
)  # fmt: skip
def test_families_compute_what_transformers_does(name: str, kind: str, tmp_path: Path) -> None:
    family = name.split()[0].replace("llama3", "llama").replace("mixtral", "llama")
    oracle = random_model(name)
    write_gguf(tmp_path / "model.gguf", oracle, family, lambda _: kind, stacked="one by one" not in name)
    check_plan(check_parity(tmp_path / "model.gguf", oracle))


def test_files_in_parts(tmp_path: Path) -> None:
    oracle = random_model("llama")
    write_gguf(tmp_path / "x.gguf", oracle, "llama", lambda _: "Q8_0", part_tensors=8)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    linked = tmp_path / "linked"  # as the hub's client keeps files: under another name
    (tmp_path / "blobs").mkdir()
    linked.mkdir()
    for i, part in enumerate(parts):
        part.rename(tmp_path / "blobs" / str(i))
        (linked / part.name).symlink_to(tmp_path / "blobs" / str(i))
    check_parity(linked / parts[0].name, oracle)
    assert resolve_model(linked) == resolve_model(linked / parts[1].name) == resolve_model(linked / parts[0].name)
    other = linked / parts[2].name
    other.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {other.name}; download all {len(parts)} parts"):
        list(open_checkpoint(resolve_model(linked)).tensors())
    shutil.copy(linked / parts[1].name, other)
    with pytest.raises(CheckpointError, match=f"does not say that it is part 3 of {len(parts)}"):
        list(open_checkpoint(resolve_model(linked)).tensors())
    shutil.copy(linked / parts[0].name, tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"is part 0 of .*; give the first part under the name"):
        resolve_model(tmp_path / "renamed.gguf")


def test_every_type_serves_beside_every_other(tmp_path: Path) -> None:
    oracle = random_model("llama", hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=4)
    kinds = iter(EVERY)
    used: list[str] = []

    def kind_of(name: str) -> str:
        used.append(next(kinds, "Q6_K"))
        return used[-1]

    write_gguf(tmp_path / "mixed.gguf", oracle, "llama", kind_of)
    assert set(used) == set(EVERY) == {kind for kind, _, _ in BLOCKS.values()}
    config = check_parity(tmp_path / "mixed.gguf", oracle).config
    assert config.quantization is not None
    assert "TQ1_0" in config.quantization.note
    assert "Q8_0" not in config.quantization.note
    always, where_not_served = config.quantization.note.split("; ")
    assert "Q6_K" not in always
    assert "Q6_K" in where_not_served
    assert "IQ3_S" in where_not_served


def bytes_of(root: Any) -> int:
    """Bytes of all tensors that an object holds."""
    seen: dict[int, Any] = {}
    storages: dict[int, int] = {}
    found = [root]
    while found:
        each = found.pop()
        if id(each) in seen or issubclass(type(each), type | ModuleType | FunctionType):
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            found += gc.get_referents(each)
    return sum(storages.values())


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "Q4_K"), ("llama tied", "Q6_K"), ("llama tied", "Q8_0"), ("qwen3moe", "IQ2_XS")]
)
def test_memory_is_that_of_the_file(name: str, kind: str, tmp_path: Path) -> None:
    if op_table().choose(ops.block_linear, OpRequest(dtype=torch.bfloat16)).name == "reference":
        pytest.skip("nothing multiplies with weights in blocks here")
    sizes = {"vocab_size": 16384, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    if "moe" in name:
        sizes |= {"vocab_size": 512, "moe_intermediate_size": 512, "num_experts": 8, "num_hidden_layers": 1}
    oracle = random_model(name, **sizes)
    file = tmp_path / "model.gguf"
    write_gguf(file, oracle, name.split()[0], lambda _: kind)
    folder = resolve_model(file)
    network = load_model(ModelConfig.from_path(folder), folder, dtype="bfloat16")
    assert isinstance(network, DecoderLM)
    stored = sum(tensor.num_bytes for tensor in read_header(file).tensors.values())
    kept = bytes_of([network.embedding, network.layers, network._lm_head])
    assert 0.9 * stored <= kept <= 1.1 * stored
    ledger = weight_ledger(network.config, "bfloat16", in_blocks=frozenset(BLOCK_BYTES))
    assert sum(ledger.values()) == pytest.approx(kept, rel=0.02)
    ids = torch.tensor([0, 1, 5, 511])
    assert torch.equal(network.embedding(ids), oracle.model.embed_tokens.weight[ids].bfloat16())
    if "moe" not in name:
        check_head_reads_blocks(tmp_path / "head", network, kept)


def check_head_reads_blocks(folder: Path, target: DecoderLM, kept: int) -> None:
    """An EAGLE-3 head without an embedding of its own looks rows up in the target's blocks.

    Args:
        folder: Made, for the head.
        kept: Bytes of the target alone.
    """
    folder.mkdir()
    config = target.config
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size, "draft_vocab_size": config.vocab_size, "num_hidden_layers": 1,
        "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    size = config.hidden_size
    shapes = {
        "fc": (size, 3 * size), "lm_head": (config.vocab_size, size), "norm": (size,),
        "midlayer.self_attn.q_proj": (256, 2 * size), "midlayer.self_attn.k_proj": (128, 2 * size),
        "midlayer.self_attn.v_proj": (128, 2 * size), "midlayer.self_attn.o_proj": (size, 256),
        "midlayer.mlp.gate_proj": (64, size), "midlayer.mlp.up_proj": (64, size), "midlayer.mlp.down_proj": (size, 64),
        "midlayer.input_layernorm": (size,), "midlayer.hidden_norm": (size,),
        "midlayer.post_attention_layernorm": (size,),
    }  # fmt: skip
    save_file({f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    head = load_model(read_eagle_config(folder, "eagle3"), folder, dtype="bfloat16")
    assert isinstance(head, EagleHead)
    own = bytes_of(head)
    head.join(target)
    ids = torch.tensor([0, 1, 5, 511])
    assert torch.equal(head.embed(ids), target.embedding.rows_of(ids))
    assert bytes_of([target.embedding, target.layers, target._lm_head, head]) < kept + own + 1e6


@pytest.mark.parametrize("kind", GGML_TYPES)
def test_blocks_are_read_to_the_bit(kind: str) -> None:
    data = blocks(kind, 8, 1024, np.random.default_rng(1))
    wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(read_ggml(torch.from_numpy(data), kind, grid_of(kind)).dequantized().numpy(), wanted)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    write_gguf(file, random_model("llama"), "llama", lambda _: "Q8_0")
    whole = file.read_bytes()
    damages: list[tuple[bytes, str]] = [
        (b"GGML" + whole[4:], "is not a GGUF file"),
        (whole[:4] + b"\1\0\0\0" + whole[8:], "GGUF version 1 is not read"),
        (whole[:300], "ends within its header"),
        (whole[:-100], "ends within the tensor"),
        (whole.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0lamma"), "general.architecture 'lamma' is not read"),
        (whole.replace(b"llama.block_count", b"llama.block_kount"), "llama.block_count is missing"),
        (whole.replace(b"blk.1.ffn_up", b"blk.1.ffn_xp"), r"1 missing: model.layers.1.mlp.up_proj.weight; 1 not known"),
        (b"", "cannot read"),
    ]
    for i, (data, message) in enumerate(damages):
        damaged = tmp_path / f"{i}.gguf"
        damaged.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            load_model(ModelConfig.from_path(folder := resolve_model(damaged)), folder)
    with pytest.raises(CheckpointError, match=r"10 GGUF files|9 GGUF files"):
        resolve_model(tmp_path)
    (tmp_path / "x.bin").write_bytes(whole)
    with pytest.raises(CheckpointError, match="a file that ends in"):
        resolve_model(tmp_path / "x.bin")


def test_the_folder_is_made_once_and_again_for_another_file(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    write_gguf(file, random_model("llama"), "llama", lambda _: "F32")
    first = resolve_model(file)
    assert resolve_model(tmp_path) == first == resolve_model(str(file))
    assert json.loads((first / "config.json").read_text())["torch_dtype"] == "float32"
    write_gguf(file, random_model("llama", num_hidden_layers=1), "llama", lambda _: "F16")
    assert ModelConfig.from_path(resolve_model(file)).num_layers == 1
