"""Speculation end to end on the demo model: outputs do not change, whatever drafts and whatever else is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_demo_heads import write_block_drafter, write_medusa_heads, write_mlp_speculator
from safetensors.torch import load_file, save_file

from quire import LLM, CheckpointError, ConfigError, RequestOutput, SamplingParams, StructuredOutputsParams
from quire_demo_model import checkpoint_path, draft_paths
from quire_models import DecoderLM
from quire_runner import draft_costs
from quire_testkit.checkpoints import make_checkpoint
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint
from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.moe_cases import MOE_CASES
from quire_testkit.parity.oracle import write_checkpoint

SETTINGS: dict[str, Any] = {
    "num_threads": 1,
    "speculative_adaptive": False,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 400,
}
SMALL = {"block_size": 4, "num_gpu_blocks_override": 28, "max_num_batched_tokens": 48, "max_model_len": 100}


def write_head(folder: Path, model: Path | None = None, **fields: Any) -> Path:
    """A random EAGLE-3 head for the demo model or another, in the published layout, with a part of the vocabulary."""
    target = json.loads(((model or checkpoint_path()) / "config.json").read_text())
    size, inner, draft_vocab = target["hidden_size"], 64, 300
    folder.mkdir()
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True}
    values = {
        **target,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "intermediate_size": inner,
        "draft_vocab_size": draft_vocab,
        "eagle_config": layers,
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(values))
    head_dim = target.get("head_dim") or size // target["num_attention_heads"]
    heads, kv = target["num_attention_heads"] * head_dim, target["num_key_value_heads"] * head_dim
    shapes = {
        "fc": (size, 3 * size),
        "midlayer.self_attn.q_proj": (heads, 2 * size),
        "midlayer.self_attn.k_proj": (kv, 2 * size),
        "midlayer.self_attn.v_proj": (kv, 2 * size),
        "midlayer.self_attn.o_proj": (size, heads),
        "midlayer.mlp.gate_proj": (inner, size),
        "midlayer.mlp.up_proj": (inner, size),
        "midlayer.mlp.down_proj": (size, inner),
        "lm_head": (draft_vocab, size),
    }
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator).mul(shape[1] ** -0.5).bfloat16()
        for name, shape in shapes.items()
    }
    for norm in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = torch.ones(size).bfloat16()
    chosen = torch.arange(draft_vocab) * (target["vocab_size"] // draft_vocab)
    tensors["d2t"] = chosen - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(target["vocab_size"], dtype=torch.bool).index_fill(0, chosen, True)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head") / "eagle3")


def conversations(llm: LLM) -> list[Any]:
    questions = [
        "What is 17 + 25?",
        "Spell the word basket.",
        "Who are you?",
        "Reverse the word lamp.",
        "What is 90 - 4?",
    ]
    return [
        llm.renderer.render_chat([{"role": "user", "content": question}]).token_ids
        for question in (*questions, questions[0])
    ]


def many_kinds() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0.9, seed=1, max_tokens=24, top_p=0.9, logprobs=2),
        SamplingParams(temperature=0, max_tokens=24, stop=["er"], repetition_penalty=1.2, presence_penalty=0.3),
        SamplingParams(temperature=1.2, seed=2, max_tokens=24, top_k=20, min_p=0.05, frequency_penalty=0.4),
        SamplingParams(
            temperature=0.7,
            seed=3,
            max_tokens=24,
            structured_outputs=StructuredOutputsParams(regex="[0-9]{2}( and [a-z]+)?"),
        ),
        SamplingParams(temperature=0, max_tokens=30, logprobs=1, min_tokens=28, logit_bias={5: 1.5}),
    ]


def seen(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens, text and logprobs of each."""
    found = []
    for output in outputs:
        one = output.outputs[0]
        logprobs = [
            [(token_id, round(entry.logprob, 5)) for token_id, entry in place.items()] for place in one.logprobs or []
        ]
        found.append((one.token_ids, one.text, one.finish_reason, logprobs))
    return found


@pytest.fixture(scope="module")
def expected() -> Iterator[list[Any]]:
    llm = LLM(**SETTINGS)
    yield seen(llm.generate(conversations(llm), many_kinds(), use_tqdm=False))
    llm.close()


@pytest.mark.parametrize("situation", [{}, SMALL, {"async_scheduling": True}], ids=["roomy", "small", "asynchronous"])
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "eagle3"])
def test_outputs_do_not_change(method: str, situation: dict[str, Any], head: Path, expected: list[Any]) -> None:
    model = {"draft_model": str(checkpoint_path()), "eagle3": str(head)}.get(method)
    llm = LLM(**{**SETTINGS, **situation}, speculative_method=method, speculative_model=model, num_speculative_tokens=3)
    prompts = conversations(llm)
    assert seen(llm.generate(prompts, many_kinds(), use_tqdm=False)) == expected
    assert seen(llm.generate(prompts, many_kinds(), use_tqdm=False)) == expected  # with prefixes that are cached now
    stats = llm.stats()
    assert stats.num_draft_tokens_total > 0
    if method == "draft_model":
        assert stats.num_accepted_tokens_total > 0.6 * stats.num_draft_tokens_total
    if situation is SMALL:
        assert stats.num_preemptions_total > 0
    llm.close()


@pytest.mark.parametrize(("method", "least"), [("draft_model", 1.8), ("eagle3", 2.1)])
def test_companions_of_the_demo_model(method: str, least: float, expected: list[Any]) -> None:
    llm = LLM(**SETTINGS, speculative_method=method, num_speculative_tokens=4)
    assert seen(llm.generate(conversations(llm), many_kinds(), use_tqdm=False)) == expected
    before = llm.stats()
    llm.generate(conversations(llm), SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    stats = llm.stats()
    num_drafts = stats.num_drafts_total - before.num_drafts_total
    assert 1 + (stats.num_accepted_tokens_total - before.num_accepted_tokens_total) / num_drafts > least
    llm.close()


def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    case = MOE_CASES["Glm4MoeForCausalLM"]
    fields = {**case.fields, "num_hidden_layers": 4, "vocab_size": 1280}
    write_checkpoint(tmp_path, "Glm4MoeForCausalLM", ParityCase(config=case.config, fields=fields))
    size, tensors = fields["hidden_size"], load_file(tmp_path / "model.safetensors")
    more = {"eh_proj": torch.randn(size, 2 * size)} | {
        name: torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    tensors |= {f"model.layers.3.{name}.weight": tensor for name, tensor in more.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    values |= {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    settings = {**SETTINGS, "model": str(tmp_path), "max_model_len": 128, "dtype": "float32"}
    settings |= {"tokenizer": str(checkpoint_path())}
    prompts = [{"prompt_token_ids": list(range(3, 20 + 7 * i))} for i in range(3)]
    params = [SamplingParams(temperature=t, seed=4, max_tokens=12, ignore_eos=True) for t in (0.0, 0.9, 0.0)]

    def tokens(llm: LLM) -> list[Any]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    plain = LLM(**settings)
    expected, weights = tokens(plain), plain.engine_info.memory_bytes
    plain.close()
    for more_settings in ({}, {"speculative_eagle_topk": 3}):
        llm = LLM(**settings, speculative_method="mtp", num_speculative_tokens=2, **more_settings)
        assert tokens(llm) == expected
        assert llm.stats().num_draft_tokens_total > 30
        layer = weights["weights: experts"] // 2 + weights["weights: attention"] // 3
        assert layer < llm.engine_info.memory_bytes["weights: draft"] < 1.5 * layer
        llm.close()
    with pytest.raises(
        ConfigError, match="is for the methods draft_model, eagle, eagle3, dflash, medusa, mlp_speculator, and"
    ):
        LLM(**settings, speculative_method="mtp", speculative_model="x")
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no layers that predict"):
        LLM(**SETTINGS, speculative_method="mtp")


def test_medusa_heads(tmp_path: Path, expected: list[Any]) -> None:
    tensors = load_file(write_medusa_heads(tmp_path) / "medusa_lm_head.safetensors")
    settings = {**SETTINGS, "speculative_method": "medusa", "speculative_model": str(tmp_path)}
    llm = LLM(**settings, num_speculative_tokens=3)
    for _ in range(2):
        assert seen(llm.generate(conversations(llm), many_kinds(), use_tqdm=False)) == expected
    stats, memory = llm.stats(), llm.engine_info.memory_bytes
    assert stats.num_draft_tokens_total > 0
    assert memory["weights: draft"] == sum(tensor.nbytes for tensor in tensors.values())
    assert memory["KV cache: draft"] == 0
    llm.close()
    with pytest.raises(ConfigError, match="has 3 Medusa heads"):
        LLM(**settings, num_speculative_tokens=4)


@pytest.mark.parametrize("kind", ["mlp_speculator", "dflash", "peagle"])
def test_other_drafters(kind: str, tmp_path: Path, expected: list[Any]) -> None:
    """Heads in a row, and drafts from one pass, by vLLM's speculative_config."""
    is_mlp = kind == "mlp_speculator"
    folder = write_mlp_speculator(tmp_path) if is_mlp else write_block_drafter(tmp_path, kind)
    method = "eagle3" if kind == "peagle" else kind
    given = {"method": method, "model": str(folder), "num_speculative_tokens": 3}
    if kind == "peagle":
        given["parallel_drafting"] = True
    llm = LLM(**SETTINGS, speculative_config=given)
    for _ in range(2):
        assert seen(llm.generate(conversations(llm), many_kinds(), use_tqdm=False)) == expected
    stats, memory = llm.stats(), llm.engine_info.memory_bytes
    assert stats.num_draft_tokens_total > 100
    stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert stored * 0.9 < memory["weights: draft"] <= stored * 3  # with the embedding, where a plan counts it
    assert (memory["KV cache: draft"] == 0) == is_mlp
    llm.close()
    refused: dict[str, dict[str, Any]] = {
        "mlp_speculator": {"num_speculative_tokens": 4}, "dflash": {"num_speculative_tokens": 4},
        "peagle": {"eagle_topk": 2},
    }  # fmt: skip
    why = {"mlp_speculator": "has 3 heads of an MLP", "dflash": "fills blocks of 4", "peagle": "gives no trees"}
    with pytest.raises(ConfigError, match=why[kind]):
        LLM(**SETTINGS, speculative_config=given | refused[kind])


def test_a_parallel_head_drafts_one_after_another_where_asked(tmp_path: Path, expected: list[Any]) -> None:
    folder = write_block_drafter(tmp_path, "peagle")
    tensors = load_file(folder / "model.safetensors")
    del tensors["mask_hidden"]  # which drafts from one pass need
    save_file(tensors, folder / "model.safetensors")
    given: dict[str, Any] = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    for eagle_topk in (1, 2):
        off = given | {"parallel_drafting": False, "eagle_topk": eagle_topk}
        llm = LLM(**SETTINGS, speculative_config=off)
        assert seen(llm.generate(conversations(llm), many_kinds(), use_tqdm=False)) == expected
        assert llm.stats().num_draft_tokens_total > 100
        assert ("in trees of" in llm.engine_info.choices["speculation"]) == (eagle_topk == 2)
        llm.close()
    with pytest.raises(CheckpointError, match="has no mask_hidden; turn parallel_drafting off"):
        LLM(**SETTINGS, speculative_config=given)


@pytest.mark.parametrize("adaptive", [False, True])
def test_trees_of_the_demo_model(adaptive: bool, expected: list[Any]) -> None:
    settings = {**SETTINGS, "speculative_adaptive": adaptive, "speculative_eagle_topk": 6}
    llm = LLM(**settings, speculative_method="eagle3", num_speculative_tokens=5)
    for _ in range(2):
        assert seen(llm.generate(conversations(llm), many_kinds(), use_tqdm=False)) == expected
    before = llm.stats()
    llm.generate(conversations(llm), SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    stats = llm.stats()
    num_drafts = stats.num_drafts_total - before.num_drafts_total
    if not adaptive:
        assert 1 + (stats.num_accepted_tokens_total - before.num_accepted_tokens_total) / num_drafts > 3
        assert stats.num_draft_tokens_total - before.num_draft_tokens_total > 15 * num_drafts
    assert "in trees of 20" in llm.engine_info.choices["speculation"]
    llm.close()


@pytest.mark.parametrize(
    ("method", "ahead"), [("draft_model", False), ("draft_model", True), ("eagle3", False), ("suffix", True)]
)
def test_the_controller_changes_no_output(
    method: str, ahead: bool, head: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where steps take too long to be measured beforehand: on so small a model it would know that nothing pays.
    monkeypatch.setattr(draft_costs, "BUDGET_S", -1.0)
    model = {"draft_model": str(checkpoint_path()), "eagle3": str(head)}.get(method)
    settings = {**SETTINGS, "speculative_adaptive": True, "async_scheduling": ahead}
    llm = LLM(**settings, speculative_method=method, speculative_model=model, num_speculative_tokens=3)
    for _ in range(4):
        assert seen(llm.generate(conversations(llm), many_kinds(), use_tqdm=False)) == expected
    stats = llm.stats()
    assert stats.num_draft_tokens_total > 0
    assert stats.draft_seconds_total > 0
    if method != "eagle3":  # which is tried before plain steps, to which its time is compared
        assert stats.draft_saved_seconds != 0
    llm.close()


def test_a_quantized_draft_model(expected: list[Any]) -> None:
    llm = LLM(
        **SETTINGS,
        speculative_method="draft_model",
        speculative_model=str(checkpoint_path()),
        speculative_quantization="int8",
    )
    assert seen(llm.generate(conversations(llm), many_kinds(), use_tqdm=False)) == expected
    assert llm.stats().num_accepted_tokens_total > 0
    llm.close()


def test_what_drafts_is_in_the_plan(head: Path) -> None:
    plain = LLM(**SETTINGS).engine_info.memory_bytes
    info = LLM(**SETTINGS, speculative_method="eagle3", speculative_model=str(head)).engine_info
    assert info.memory_bytes["KV cache: draft"] * 5 == info.memory_bytes["KV cache"] == plain["KV cache"]
    assert info.memory_bytes["weights: draft"] > 0
    assert "eagle3" in info.choices["speculation"]


def test_a_head_that_names_no_layers_reads_the_usual_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input of layers 2, L/2 and L - 3, as Transformers computes it; where these are no three, it has to say."""
    model = tiny_hf_checkpoint(tmp_path / "model", "llama", num_hidden_layers=8)
    head = write_head(tmp_path / "head", tmp_path / "model", eagle_config=None)
    settings: dict[str, Any] = {"model": str(tmp_path / "model"), "dtype": "float32", "max_model_len": 128}
    settings["tokenizer"] = str(checkpoint_path())
    seen_layers: list[tuple[tuple[int, ...], torch.Tensor]] = []
    forward = DecoderLM.forward_with_features

    def watched(self: DecoderLM, batch: Any, layers: tuple[int, ...]) -> Any:
        hidden, features = forward(self, batch, layers)
        seen_layers.append((layers, features.clone()))
        return hidden, features

    monkeypatch.setattr(DecoderLM, "forward_with_features", watched)
    prompt = list(range(3, 40))
    with LLM(**{**SETTINGS, **settings}, speculative_method="eagle3", speculative_model=str(head)) as llm:
        llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    layers, features = seen_layers[0]
    assert layers == (2, 4, 5)
    with torch.inference_mode():
        inputs = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    wanted = torch.cat([inputs[layer][0] for layer in layers], dim=-1)
    assert (features - wanted).abs().max() < 1e-3 < 0.1 < (inputs[2] - inputs[3]).abs().max()
    shallow = write_head(tmp_path / "shallow", eagle_config=None)
    with pytest.raises(CheckpointError, match=r"names no layers.*this one has 5"):
        LLM(**SETTINGS, speculative_method="eagle3", speculative_model=str(shallow))


def test_what_cannot_draft_is_refused(tmp_path: Path, head: Path) -> None:
    def refused(error: type[Exception], text: str, **settings: Any) -> None:
        with pytest.raises(error, match=text):
            LLM(**{**SETTINGS, **settings})

    refused(ConfigError, "needs the model that drafts", speculative_method="eagle")
    refused(ConfigError, "needs the model", speculative_method="draft_model", model=str(checkpoint_path()))
    refused(ConfigError, "is for the methods", speculative_method="ngram", speculative_model="x")
    refused(
        CheckpointError, "config.json|hub|folder", speculative_method="eagle3", speculative_model=str(tmp_path / "no")
    )
    small = make_checkpoint(tmp_path / "small", like="qwen3", dtype="float32", vocab_size=600)
    refused(ConfigError, "another vocabulary", speculative_method="draft_model", speculative_model=str(small))
    (small / "tokenizer.json").unlink()
    refused(ConfigError, "no two tokenizers to compare", speculative_method="draft_model", speculative_model=str(small))
    other = write_head(tmp_path / "other", hidden_size=128)
    refused(ConfigError, "is for a model of hidden size", speculative_method="eagle3", speculative_model=str(other))
    layers = write_head(tmp_path / "layers", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 60]})
    refused(CheckpointError, "trained for another model", speculative_method="eagle3", speculative_model=str(layers))
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    for path in checkpoint_path().iterdir():
        (renamed / path.name).write_bytes(path.read_bytes())
    stored = json.loads((renamed / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (renamed / "tokenizer.json").write_text(json.dumps(stored))
    refused(ConfigError, "another vocabulary", speculative_method="draft_model", speculative_model=str(renamed))


def write_padded(folder: Path, source: Path, rows: int) -> Path:
    """A model with more rows in its embedding than its tokenizer has tokens, as some are padded."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if len(tensor) == config["vocab_size"]:
            more = torch.randn(rows, *tensor.shape[1:], generator=generator) * 0.02
            tensors[name] = torch.cat([tensor, more.to(tensor.dtype)])
    config["vocab_size"] += rows
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("padded", ["target", "draft", "both"])
def test_embeddings_may_be_padded_as_each_model_likes(tmp_path: Path, padded: str) -> None:
    target, draft = checkpoint_path(), Path(draft_paths()["draft_model"])
    if padded in ("target", "both"):
        target = write_padded(tmp_path / "target", target, 40)
    if padded in ("draft", "both"):
        draft = write_padded(tmp_path / "draft", draft, 100)
    if padded == "target":  # a draft model that brings the same tokenizer
        draft = write_padded(tmp_path / "draft", draft, 0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if draft.parent == tmp_path:
            (draft / name).write_bytes((checkpoint_path() / name).read_bytes())
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    prompts = [[5, 6, 7] * 9, [vocab_size - 1, 8, 9, vocab_size - 1], list(range(30, 60))]
    params = [SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=24, ignore_eos=True) for i in range(3)]
    settings = {**SETTINGS, "model": str(target)}
    with LLM(**settings) as llm:
        expected = seen(llm.generate(prompts, params, use_tqdm=False))
    drafting = {"speculative_method": "draft_model", "speculative_model": str(draft), "speculative_adaptive": False}
    with LLM(**{**settings, **drafting}) as llm:
        assert seen(llm.generate(prompts, params, use_tqdm=False)) == expected
        assert llm.stats().num_accepted_tokens_total > 0
