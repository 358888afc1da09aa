"""`quantize_checkpoint`: what it writes is what `--quantization` computes with, and what Transformers reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.assemble import build_renderer
from quire.calibration_text import read_calibration
from quire.config import QuireConfig
from quire.evaluation import perplexity
from quire.quantize import MARKER, SCHEMES, quantize_checkpoint
from quire_demo_model import checkpoint_path
from quire_interfaces import CheckpointError, ConfigError
from quire_models import ModelConfig
from quire_testkit.checkpoints import make_checkpoint

IDS = {"prompt_token_ids": [5, 9, 200, 31, 7, 7, 100, 250, 3]}
TEXT = [[(7 * i * i + 3 * j) % 500 + 5 for i in range(60)] for j in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model") / "tiny", like="qwen3", dtype="float32", hidden_size=128,
        intermediate_size=256, head_dim=32,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "algorithm"),
    [*((scheme, "rtn") for scheme in SCHEMES if scheme != "fp8-static"), ("int4-g32", "gptq"), ("int8", "gptq"),
     ("int4-g32", "awq")],
)  # fmt: skip
def test_transformers_computes_the_same_tokens(scheme: str, algorithm: str, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    text = () if algorithm == "rtn" else TEXT
    report = quantize_checkpoint(folder, out, scheme, algorithm=algorithm, calibration=text, file_bytes=200_000)
    assert report.num_quantized == 14
    assert report.bytes_after < report.bytes_before
    assert len(report.files) > 1
    with LLM(out, max_model_len=128, num_threads=1) as llm:
        assert "_linear for 14" in llm.engine_info.choices["weights"]
        found = llm.generate([IDS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    oracle = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    prompt = torch.tensor([IDS["prompt_token_ids"]])
    wanted = oracle.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, prompt.shape[1] :]
    assert list(found) == wanted.tolist()


def test_bad_requests_say_what_to_do(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="no scheme 'int3'; choose one of int8, fp8, fp8-static, int4-g128, int4-g64, int4-g32, none"
    ):
        quantize_checkpoint(folder, tmp_path / "a", "int3")
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        quantize_checkpoint(folder, folder, "int8")
    quantize_checkpoint(folder, tmp_path / "b", "int8")
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_checkpoint(tmp_path / "b", tmp_path / "c", "int8")


def test_what_was_interrupted_is_not_there(folder: Path, tmp_path: Path) -> None:
    out, left = tmp_path / "out", tmp_path / "out.unfinished"
    quantize_checkpoint(folder, tmp_path / "whole", "int8")

    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            assert [path.name for path in tmp_path.glob("out*")] == [left.name]
            assert (left / "part-0").stat().st_size > 0
            raise KeyboardInterrupt

    for scheme, calibration in (("int8", ()), ("fp8-static", TEXT)):
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(folder, out, scheme, calibration=calibration, file_bytes=100_000, progress=interrupt)
        assert not list(tmp_path.glob("out*"))
    left.mkdir()
    (left / "part-0").write_bytes(b"somebody else's")
    with pytest.raises(ConfigError, match=r"out\.unfinished, .* is not what an interrupted run has left"):
        quantize_checkpoint(folder, out, "int8")
    assert (left / "part-0").read_bytes() == b"somebody else's"
    (left / MARKER).touch()  # as a run leaves it that was killed
    out.mkdir()
    quantize_checkpoint(folder, out, "int8")
    assert not left.exists()
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("scheme", ["int8", "fp8-static"])
def test_memory_holds_a_layer_and_a_file(scheme: str, folder: Path, tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 20, "vocab_size": 512}
    large = make_checkpoint(tmp_path / "large", like="llama", dtype="bfloat16", **shape)
    text = TEXT if scheme == "fp8-static" else ()
    quantize_checkpoint(folder, tmp_path / "first", scheme, calibration=text)  # what is loaded once
    seen = [anonymous_memory()]
    report = quantize_checkpoint(
        large, tmp_path / "out", scheme, calibration=text, file_bytes=1 << 20,
        progress=lambda done, total: seen.append(anonymous_memory()),
    )  # fmt: skip
    assert report.bytes_before > 30e6
    assert len(report.files) > 18
    assert max(seen) - seen[0] < report.bytes_before / 3


def anonymous_memory() -> int:
    """Bytes of this process that are not of mapped files."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_layers_that_do_not_fit_stay_as_they_are(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 160, "head_dim": 32}
    folder = make_checkpoint(tmp_path / "odd", like="llama", dtype="bfloat16", **shape)
    report = quantize_checkpoint(folder, tmp_path / "out", "int4-g128")
    assert report.left == ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(report.left) <= set(ignored)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as reader:
        assert reader.get_tensor("model.layers.0.mlp.down_proj.weight").dtype == torch.bfloat16
    with LLM(tmp_path / "out", max_model_len=128, num_threads=1) as llm:
        assert len(llm.generate([IDS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_static_fp8_has_the_largest_inputs(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantize_checkpoint(folder, tmp_path / "out", "fp8-static", calibration=TEXT)
    largest: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            largest[name] = max(largest.get(name, 0.0), float(inputs[0].detach().abs().max()))

        return hook

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in plain.model.layers[0].named_modules(prefix="model.layers.0"):
        if isinstance(module, torch.nn.Linear) and "down" not in name and "o_proj" not in name:
            module.register_forward_pre_hook(watch(name))
    plain(torch.tensor(TEXT))
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as reader:
        found = {name: float(reader.get_tensor(f"{name}.input_scale")) for name in largest}
        weight = reader.get_tensor("model.layers.1.mlp.up_proj.weight").float()
        wide = weight * reader.get_tensor("model.layers.1.mlp.up_proj.weight_scale").float()
    assert len(found) == 5
    # What comes before the layers of one that are not looked at is rounded already.
    assert {n: found[n] for n in found if "self_attn" in n} == pytest.approx(
        {n: largest[n] / 448 for n in found if "self_attn" in n}, rel=1e-4
    )
    assert found == pytest.approx({name: size / 448 for name, size in largest.items()}, rel=0.1)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    oracle(torch.tensor(TEXT[:1]))  # takes the layers out of their compressed form
    layer = oracle.model.layers[1].mlp.up_proj
    assert torch.equal(layer.weight.float(), wide)
    assert layer.quantization_scheme.input_activations.dynamic is False
    with LLM(tmp_path / "out", max_model_len=128, num_threads=1) as llm:
        assert "inputs stay as they are" in llm.engine_info.choices["weights"]


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_experts_are_quantized(algorithm: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    folder = make_checkpoint(tmp_path / "moe", like="qwen3-moe", dtype="float32", **shape)
    out, text = tmp_path / "out", TEXT if algorithm == "gptq" else ()
    report = quantize_checkpoint(folder, out, "int4-g32", algorithm=algorithm, calibration=text)
    assert all(name.endswith("mlp.gate") for name in report.left)
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    experts = len(wide.model.layers[0].mlp.experts.gate_up_proj)
    assert report.num_quantized == 4 + 3 * experts
    inner = wide.model.layers[0].mlp.experts.gate_up_proj.shape[1] // 2
    with torch.no_grad(), safe_open(out / "model.safetensors", framework="pt") as reader:
        places = {f"self_attn.{n}_proj": getattr(wide.model.layers[0].self_attn, f"{n}_proj").weight for n in "qkvo"}
        for i in range(experts):
            both, down = (getattr(wide.model.layers[0].mlp.experts, n)[i] for n in ("gate_up_proj", "down_proj"))
            places |= {f"mlp.experts.{i}.gate_proj": both[:inner], f"mlp.experts.{i}.up_proj": both[inner:]}
            places[f"mlp.experts.{i}.down_proj"] = down
        for name, place in places.items():
            place.copy_(unpacked(reader, f"model.layers.0.{name}"))
    prompt = torch.tensor([IDS["prompt_token_ids"]])
    wanted = wide.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, prompt.shape[1] :]
    with LLM(out, max_model_len=128, num_threads=1) as llm:
        assert f"_linear for {4 + 3 * experts}" in llm.engine_info.choices["weights"]
        found = llm.generate([IDS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert list(found) == wanted.tolist()


def unpacked(reader: Any, name: str) -> torch.Tensor:
    """An int4 layer by compressed-tensors."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    scale = reader.get_tensor(f"{name}.weight_scale")
    shape = torch.Size(reader.get_tensor(f"{name}.weight_shape").tolist())
    numbers = unpack_from_int32(reader.get_tensor(f"{name}.weight_packed"), 4, shape)
    return numbers * scale.repeat_interleave(32, dim=1)


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_matrices_that_are_kept_as_one(algorithm: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1023, max_position_embeddings=256,
    )  # fmt: skip
    make_checkpoint(tmp_path / "phi3", like="llama")  # for its tokenizer
    (tmp_path / "phi3" / "model.safetensors").unlink()
    Phi3ForCausalLM(config).save_pretrained(tmp_path / "phi3")
    report = quantize_checkpoint(tmp_path / "phi3", tmp_path / "out", "int4-g32", algorithm=algorithm, calibration=TEXT)
    assert report.num_quantized == 8
    with LLM(tmp_path / "out", max_model_len=128, num_threads=1) as llm:
        found = llm.generate([IDS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    prompt = torch.tensor([IDS["prompt_token_ids"]])
    wanted = oracle.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, prompt.shape[1] :]
    assert list(found) == wanted.tolist()


def test_calibration_keeps_more_of_the_demo_model(tmp_path: Path) -> None:
    """Perplexity of what the model itself writes, which no other weights predict better (docs/quantization.md)."""

    def texts(llm: LLM, seed: int, count: int) -> list[list[int]]:
        prompts = [{"prompt_token_ids": [3 + (seed * count + i) * 37 % 1277]} for i in range(count)]
        params = [
            SamplingParams(temperature=1.0, max_tokens=255, ignore_eos=True, seed=seed * count + i)
            for i in range(count)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[*p["prompt_token_ids"], *o.outputs[0].token_ids] for p, o in zip(prompts, outputs, strict=True)]

    def measured(model: Path) -> float:
        with LLM(model, max_model_len=257, num_threads=1) as llm:
            return perplexity(llm, [token for one in held_out for token in one], window=256).perplexity

    def cost(model: Path, algorithm: str) -> float:
        out = tmp_path / f"{model.name}-{algorithm}"
        calibration = () if algorithm == "rtn" else text
        quantize_checkpoint(model, out, "int4-g32", algorithm=algorithm, calibration=calibration)
        return measured(out) / plain - 1

    with LLM(checkpoint_path(), max_model_len=257, num_threads=1) as llm:
        held_out, text = texts(llm, 1, 24), texts(llm, 2, 16)
    plain = measured(checkpoint_path())
    nearest = cost(checkpoint_path(), "rtn")
    assert 0.02 < nearest < 0.10
    assert cost(checkpoint_path(), "gptq") < 0.5 * nearest
    # The same network with inputs of which some are large, as those of large networks are.
    uneven = with_large_inputs(checkpoint_path(), tmp_path / "uneven")
    assert cost(uneven, "awq") < 0.5 * cost(uneven, "rtn")


def with_large_inputs(folder: Path, out: Path) -> Path:
    """What norms give times 32 for one channel of 16, and columns divided by it: exact, for it is a power of two."""
    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            tensor[::16] *= 32
        elif name.endswith(tuple(f"{kind}_proj.weight" for kind in ("q", "k", "v", "gate", "up"))):
            tensor[:, ::16] /= 32
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_bad_calibration_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    def refused(match: str, scheme: str, **more: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            quantize_checkpoint(folder, tmp_path / "out", scheme, **more)

    refused("gptq needs a text to calibrate with", "int4-g32", algorithm="gptq")
    refused("fp8-static needs a text to calibrate with", "fp8-static")
    refused("gptq is for int8 and int4, not for fp8", "fp8", algorithm="gptq", calibration=TEXT)
    refused("no algorithm 'obq'; choose one of rtn, gptq, awq", "int8", algorithm="obq")
    refused("fp8 with rtn does not look at a text", "fp8", calibration=TEXT)


QUESTIONS = ["What is 7 + 8?", "Spell the word banana.", "What is the capital of France?", "Write b three times."]


@pytest.mark.parametrize(("scheme", "kv_cache_scheme"), [("none", "fp8"), ("fp8", "fp8-per-head")])
def test_keys_beyond_fp8_keep_their_answers_once_calibrated(scheme: str, kv_cache_scheme: str, tmp_path: Path) -> None:
    """Keys and values 4,096 times as large, queries and outputs as much smaller: the same network, exactly."""
    large, out = tmp_path / "large", tmp_path / "out"
    shutil.copytree(checkpoint_path(), large)
    tensors = load_file(large / "model.safetensors")
    for name, tensor in tensors.items():
        if ".self_attn." in name:
            tensor *= 4096.0 if name.endswith(("k_proj.weight", "v_proj.weight")) else 1 / 4096
    save_file(tensors, large / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig.from_path(large)
    renderer = build_renderer(QuireConfig(), large, config)
    text = [renderer.render_chat([{"role": "user", "content": one}]).token_ids for one in QUESTIONS]

    def answers(folder: Path, dtype: str) -> tuple[str, list[str]]:
        with LLM(folder, kv_cache_dtype=dtype, max_model_len=128, num_threads=1) as llm:
            prompts = [{"prompt_token_ids": ids} for ids in text]
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
            return llm.engine_info.choices["KV cache"], [output.outputs[0].text for output in outputs]

    _, wanted = answers(large, "bfloat16")
    assert answers(large, "fp8")[1] != wanted
    report = quantize_checkpoint(large, out, scheme, kv_cache_scheme=kv_cache_scheme, calibration=text)
    assert (report.num_kv_scales, report.num_quantized) == (5, 35 if scheme == "fp8" else 0)
    assert answers(out, "auto") == (
        "fp8_e4m3, the checkpoint's scales for 5 of 5 layers, 1.0 for the others",
        wanted,
    )
    scales = {name: scale for name, scale in load_file(out / "model.safetensors").items() if name.endswith("_scale")}
    scales = {name: scale for name, scale in scales.items() if name.endswith((".k_scale", ".v_scale"))}
    heads = config.num_kv_heads if kv_cache_scheme == "fp8-per-head" else 1
    assert [scale.numel() for scale in scales.values()] == [heads] * 10
    stored = json.loads((out / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert stored["strategy"] == ("attn_head" if heads > 1 else "tensor")


def test_scales_of_keys_are_the_largest_keys(tmp_path: Path) -> None:
    """Of the first layer, whose keys a formula gives: rotated, normed by head."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3 import modeling_qwen3

    folder = make_checkpoint(tmp_path / "tiny", like="qwen3", dtype="float32")
    quantize_checkpoint(folder, tmp_path / "out", "none", kv_cache_scheme="fp8-per-head", calibration=TEXT)
    seen: list[torch.Tensor] = []
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    plain = modeling_qwen3.eager_attention_forward

    def watch(module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, *more: Any, **options: Any) -> Any:
        seen.extend(one.detach().abs().amax(dim=(0, 2, 3)) for one in (key, value))
        return plain(module, query, key, value, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3, "eager_attention_forward", watch)
        oracle(torch.tensor(TEXT))
    found = load_file(tmp_path / "out" / "model.safetensors")
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(2) for kind in "kv"]
    for name, largest in zip(names, seen, strict=True):
        torch.testing.assert_close(found[name].flatten(), largest / 448, rtol=1e-4, atol=0)


def test_bad_kv_cache_schemes_say_what_to_do(folder: Path, tmp_path: Path) -> None:
    def refused(match: str, scheme: str, **more: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            quantize_checkpoint(folder, tmp_path / "out", scheme, **more)

    refused("no scheme 'int8' of the KV cache; choose one of fp8, fp8-per-head", "int8", kv_cache_scheme="int8")
    refused("a KV cache with scales needs a text to calibrate with", "int8", kv_cache_scheme="fp8")
    refused("none leaves the weights as they are: give a scheme of the KV cache", "none")
    states = make_checkpoint(tmp_path / "states", like="mamba2")
    with pytest.raises(CheckpointError, match="no layer that keeps keys and values"):
        quantize_checkpoint(states, tmp_path / "out", "int8", kv_cache_scheme="fp8", calibration=TEXT)


def test_files_of_text(folder: Path, tmp_path: Path) -> None:
    renderer = build_renderer(QuireConfig(), folder, ModelConfig.from_path(folder))
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("some words, again and again. " * 400, encoding="utf-8")
    whole = renderer.tokenizer.encode(plain.read_text())
    found = read_calibration(plain, renderer, max_tokens=1300)
    assert [len(one) for one in found] == [512, 512, 276]
    assert [token for one in found for token in one] == whole[:1300]
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "you"}]
    rows = [{"text": "one text"}, {"messages": messages}]
    lines.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    text, chat = read_calibration(lines, renderer, max_tokens=1000)
    assert text == renderer.tokenizer.encode("one text")
    assert chat == renderer.render_chat(messages, add_generation_prompt=False).token_ids
    lines.write_text('{"text": 5}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a.jsonl, line 1 should be"):
        read_calibration(lines, renderer, max_tokens=10)
    lines.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no text to calibrate with"):
        read_calibration(lines, renderer, max_tokens=10)
