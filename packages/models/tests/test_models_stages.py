"""Networks that are cut into pipeline stages give the bits of one network. Stages are threads here."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver
from models_quantized import make
from torch import Tensor

from quire_distributed import Collectives, Mesh, run_thread_ranks, thread_group
from quire_interfaces import ConfigError, Modality
from quire_models import ModelConfig, build_model, load_model
from quire_models.layers.stage_lm import StageLM
from quire_models.media_spec import MediaSpec
from quire_models.stages import StageSpec, stage, stage_layers, stage_refusal
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

KINDS = [
    "BambaForCausalLM",  # attention beside Mamba-2
    "BloomForCausalLM",  # a norm behind the embedding, which is the head's matrix, too
    "DeepseekV3ForCausalLM",  # latent attention, dense layers before those with experts
    "Gemma2ForCausalLM",  # soft caps, norms behind parts
    "Gemma3ForCausalLM",  # windows, two rotations
    "GPT2LMHeadModel",  # positions are learned
    "GptOssForCausalLM",
    "JambaForCausalLM",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "NemotronHForCausalLM",  # layers without a mixer
    "OPTForCausalLM",
    "Phi3ForCausalLM",  # fused projections in the checkpoint
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3NextForCausalLM",
    "RwkvForCausalLM",
]


class Neighbours:
    """The stages before and behind one of them."""

    def __init__(self, group: Collectives) -> None:
        self._group = group

    def receive(self, like: Tensor) -> Tensor:
        return self._group.recv(like, self._group.rank - 1)

    def send(self, hidden: Tensor) -> None:
        self._group.send(hidden, self._group.rank + 1)


def run(folder: Path, *, tp_group: Collectives | None = None, pp_group: Collectives, **options: Any) -> Tensor:
    """What the last stage makes of a prefill beside a chunked one, then of decode steps of both: logits
    [N, vocab_size]."""
    config = ModelConfig.from_path(folder)
    model = load_model(config, folder, tp_group=tp_group, pp_group=pp_group, **options)
    if isinstance(model, StageLM):
        model.neighbours = Neighbours(pp_group)
    driver = PagedDriver(model, block_size=8, shuffle=True)
    rng = random.Random(3)
    first, second = (driver.add([rng.randrange(3, 60) for _ in range(length)]) for length in (37, 29))
    driver.step((first, 30), (second, 4))
    driver.step((first, 1), (second, 16))
    for _ in range(4):
        driver.step((first, 1), (second, 1))
    return torch.stack([*first.logits, *second.logits])


def staged_bits(folder: Path, size: int, **options: Any) -> None:
    """Hold the logits of the last of `size` stages to those of one network."""
    (alone,) = run_thread_ranks(1, lambda group: run(folder, pp_group=group, **options))
    assert torch.equal(run_thread_ranks(size, lambda group: run(folder, pp_group=group, **options))[-1], alone)


@pytest.mark.parametrize("architecture", KINDS)
def test_stages_give_the_bits_of_one(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    for dtype in ("float32", "bfloat16"):
        staged_bits(tmp_path, 2, dtype=dtype)


@pytest.mark.parametrize("name", ["llama"])
def test_quantized_checkpoints_are_cut(name: str, tmp_path: Path) -> None:
    tiny_hf_checkpoint(tmp_path, name, hidden_size=128, intermediate_size=320, num_hidden_layers=4)
    staged_bits(tmp_path, 3, dtype="bfloat16", linear_method="int8")
    staged_bits(tmp_path, 4, dtype="bfloat16", linear_method="int4")


def test_stored_forms_are_cut(tmp_path: Path) -> None:
    make(tmp_path, "gptq")
    staged_bits(tmp_path, 2, dtype="bfloat16")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "BambaForCausalLM", "MixtralForCausalLM"])
def test_tensors_and_layers_are_shared_at_once(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    (alone,) = run_thread_ranks(1, lambda group: run(tmp_path, pp_group=group, dtype="bfloat16"))
    meshes = [Mesh(tp=2, pp=2, rank=rank) for rank in range(4)]
    tp_groups, pp_groups = ([thread_group(2), thread_group(2)] for _ in range(2))

    def one(world: Collectives) -> Tensor:
        mesh = meshes[world.rank]
        tp, pp = tp_groups[mesh.pp_rank][mesh.tp_rank], pp_groups[mesh.tp_rank][mesh.pp_rank]
        return run(tmp_path, tp_group=tp, pp_group=pp, dtype="bfloat16")

    ranks = run_thread_ranks(4, one)
    assert torch.equal(ranks[2], alone)
    assert torch.equal(ranks[3], alone)


def test_a_stage_has_its_layers_only(tmp_path: Path) -> None:
    tiny_hf_checkpoint(tmp_path, "llama", num_hidden_layers=4, tie_word_embeddings=False)
    config = ModelConfig.from_path(tmp_path)

    def names(group: Collectives) -> set[str]:
        return {parameter.name for parameter in build_model(config, pp_group=group).parameters}

    (alone,), (first, last) = run_thread_ranks(1, names), run_thread_ranks(2, names)
    assert first | last == alone
    assert not first & last
    assert "model.embed_tokens.weight" in first
    assert {"model.norm.weight", "lm_head.weight"} <= last
    assert {name.split(".")[2] for name in first if "layers" in name} == {"0", "1"}
    specs = [stage(config.network, rank, 2) for rank in range(2)]
    assert [each.cache_names() for each in specs] == [
        ("model.layers.0", "model.layers.1"),
        ("model.layers.2", "model.layers.3"),
    ]


def test_a_tied_table_is_on_both_ends(tmp_path: Path) -> None:
    tiny_hf_checkpoint(tmp_path, "llama", num_hidden_layers=3, tie_word_embeddings=True)
    network = ModelConfig.from_path(tmp_path).network
    stages = [stage(network, rank, 3) for rank in range(3)]
    assert all(isinstance(each, StageSpec) for each in stages)
    assert [each.has_table for each in stages if isinstance(each, StageSpec)] == [True, False, True]


def test_the_last_stage_has_the_table_where_a_drafting_head_reads_it(tmp_path: Path) -> None:
    tiny_hf_checkpoint(tmp_path, "llama", num_hidden_layers=3, tie_word_embeddings=False)
    network = dataclasses.replace(ModelConfig.from_path(tmp_path).network, last_stage_embeds=True)
    stages = [stage(network, rank, 3) for rank in range(3)]
    assert [isinstance(each, StageSpec) and each.has_table for each in stages] == [True, False, True]
    assert [isinstance(each, StageSpec) and each.is_elsewhere(network.embedding_name) for each in stages] == [
        False,
        True,
        False,
    ]


def test_the_head_counts_with_the_last_stage(tmp_path: Path) -> None:
    """Layers of some 28,000 weights, and a head of as many as six of them."""
    tiny_hf_checkpoint(tmp_path, "llama", num_hidden_layers=8, hidden_size=64, intermediate_size=128)
    network = ModelConfig.from_path(tmp_path).network
    (layer,) = {sum(math.prod(weight.shape) for weight in layer.weights()) for layer in network.layers}
    wide = dataclasses.replace(network, vocab_size=6 * layer // 64)
    assert stage_layers(wide, 2) == (range(7), range(7, 8))
    bare = dataclasses.replace(network, has_lm_head=False)
    assert stage_layers(bare, 3) in ((range(2), range(2, 5), range(5, 8)), (range(3), range(3, 5), range(5, 8)))
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 9, and the network has 8 layers"):
        stage_layers(network, 9)


def test_layers_are_with_the_index_whose_finds_they_read() -> None:
    fields = {"architectures": ["GlmMoeDsaForCausalLM"], **CASES["GlmMoeDsaForCausalLM"].fields}
    network = ModelConfig.from_dict({**fields, "indexer_types": ["full", "shared", "shared", "full"]}).network
    assert stage_layers(network, 2) == (range(3), range(3, 4))
    with pytest.raises(ConfigError, match="the network has 2 layers with an index of their own"):
        stage_layers(network, 3)


@pytest.mark.parametrize("architecture", ["Zamba2ForCausalLM", "BartForConditionalGeneration", "HYV4ForCausalLM"])
def test_networks_whose_layers_see_more_are_refused(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    assert "serve it with one stage" in stage_refusal(ModelConfig.from_path(tmp_path), 2)


def test_media_that_other_stages_read_are_refused(tmp_path: Path) -> None:
    tiny_hf_checkpoint(tmp_path, "llama", num_hidden_layers=4, tie_word_embeddings=True)
    text = ModelConfig.from_path(tmp_path)
    first = len(stage_layers(text.network, 2)[0])

    def refusal(**media: Any) -> str:
        spec = MediaSpec(architecture="Some", modalities=(Modality.IMAGE,), width=64, **media)
        return stage_refusal(dataclasses.replace(text, media=spec), 2)

    assert refusal() == ""
    assert refusal(deepstack_layers=(1, first)) == ""
    assert f"in front of layer {first + 1}, and the stage that has the towers has {first} layers" in refusal(
        deepstack_layers=(1, first + 1)
    )
    assert "layers of all stages attend to media" in refusal(cross_attention_layers=(1,))
