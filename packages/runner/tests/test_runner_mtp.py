"""Layers that predict further tokens, as drafting heads: what they propose, by Transformers' own decoder layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from runner_drafting import NUM_DRAFTS, Engine, requests
from runner_harness import random_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_interfaces import ConfigError
from quire_models import load_model
from quire_models.config import ModelConfig
from quire_models.draft_heads.mtp_config import mtp_config
from quire_spec_decode import paths
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

ARCHITECTURES = ["Glm4MoeForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"]
GATED = ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"]
CHAINS = [*GATED, "DeepseekV32ForCausalLM"]


class Checkpoint:
    """A random model of three layers whose fourth predicts further tokens, in the published layout."""

    fields: ClassVar[dict[str, Any]] = {}

    def __init__(self, folder: Path, architecture: str) -> None:
        case = CASES[architecture]
        fields = {**case.fields, "num_hidden_layers": 4, **self.fields}
        case = type(case)(config=case.config, fields=fields, weight_scale=case.weight_scale)
        self.folder = folder
        self.oracle = write_checkpoint(folder, architecture, case)
        body = self.oracle.model
        self.layer, body.layers = body.layers[3], body.layers[:3]
        size, generator = self.oracle.config.hidden_size, torch.Generator().manual_seed(1)
        self.more = {
            "enorm.weight": torch.rand(size, generator=generator) + 0.5,
            "hnorm.weight": torch.rand(size, generator=generator) + 0.5,
            "eh_proj.weight": torch.randn(size, 2 * size, generator=generator) * 0.2,
            "shared_head.norm.weight": torch.rand(size, generator=generator) + 0.5,
        }
        tensors = load_file(folder / "model.safetensors")
        tensors |= {f"model.layers.3.{name}": tensor for name, tensor in self.more.items()}
        # Copies of the target's, which are not read.
        tensors["model.layers.3.embed_tokens.weight"] = torch.full_like(tensors["model.embed_tokens.weight"], torch.nan)
        tensors["model.layers.3.shared_head.head.weight"] = torch.full_like(tensors["lm_head.weight"], torch.nan)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        values = json.loads((folder / "config.json").read_text())
        values |= {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
        values |= {name: values[name][:3] for name in ("layer_types", "mlp_layer_types") if values.get(name)}
        (folder / "config.json").write_text(json.dumps(values))

    def scores(self, tokens: list[int], guesses: list[int]) -> Tensor:
        """Log probabilities [vocab_size] of what follows, by the definition: states of the model up to the
        last but one token, then those of the layer itself."""
        body = self.oracle.model
        with torch.no_grad():
            states = body(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
            for count in range(len(guesses) + 1):
                embedded = body.embed_tokens(torch.tensor([*tokens[1:], *guesses[:count]]))
                both = torch.cat((self._norm(embedded, "enorm"), self._norm(states, "hnorm")), -1)
                x = (both @ self.more["eh_proj.weight"].T)[None]
                positions = torch.arange(len(states))[None]
                mask = torch.full((1, 1, len(states), len(states)), -torch.inf).triu(1)
                rotations = body.rotary_emb(x, positions)
                out = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotations)
                out = out[0] if isinstance(out, tuple) else out
                states = torch.cat((states, self.state(out[0, -1:])))
            return self.oracle.lm_head(self._norm(out[0, -1], "shared_head.norm")).log_softmax(-1)

    def state(self, out: Tensor) -> Tensor:
        """What the layer gave, as it stands for the states of further tokens."""
        return out

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.oracle.config.rms_norm_eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.more[f"{name}.weight"]


class GatedCheckpoint(Checkpoint):
    """The same of a hybrid, whose further layer is named apart, and whose norms are written as what they add to 1."""

    NAMES: ClassVar[dict[str, str]] = {
        "enorm.weight": "pre_fc_norm_embedding.weight",
        "hnorm.weight": "pre_fc_norm_hidden.weight",
        "eh_proj.weight": "fc.weight",
        "shared_head.norm.weight": "norm.weight",
    }
    fields: ClassVar[dict[str, Any]] = {
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    }

    def __init__(self, folder: Path, architecture: str) -> None:
        super().__init__(folder, architecture)
        stored = load_file(folder / "model.safetensors")
        tensors, layer = {}, "model.layers.3."
        for name, tensor in stored.items():
            within = name.removeprefix(layer)
            if within == name:
                tensors[name] = tensor
            elif within in self.NAMES:
                tensors[f"mtp.{self.NAMES[within]}"] = tensor - 1 if "norm" in within else tensor
            elif not within.startswith(("embed_tokens.", "shared_head.")):
                tensors[f"mtp.layers.0.{within}"] = tensor
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def state(self, out: Tensor) -> Tensor:
        return self._norm(out, "shared_head.norm")


@pytest.fixture(scope="module", params=ARCHITECTURES + GATED)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made = GatedCheckpoint if request.param in GATED else Checkpoint
    return made(tmp_path_factory.mktemp("mtp"), request.param)


@pytest.mark.parametrize("topk", [1, 3])
def test_drafts_are_those_of_the_layer(checkpoint: Checkpoint, topk: int) -> None:
    config = ModelConfig.from_path(checkpoint.folder)
    target = load_model(config, checkpoint.folder, dtype="float32")
    head = load_model(mtp_config(config), checkpoint.folder, dtype="float32")
    if topk > 1 and config.architecture in CHAINS:
        with pytest.raises(ConfigError, match="cannot be verified in trees by op"):
            Engine(target, head, topk=topk)
        return
    alone = Engine(target).run(*requests())
    engine = Engine(target, head, topk=topk)
    assert engine.run(*requests()) == alone
    found = list(zip(engine.proposals, engine.parents, strict=True))
    checked = found[:: max(1, len(found) // 5)]
    for (tokens, drafts), parents in checked:
        for path in paths(range(-1, len(drafts) - 1) if parents is None else parents):
            way = [drafts[i] for i in path]
            best = checkpoint.scores(tokens, way[:-1]).topk(topk).indices.tolist()
            assert way[-1] in best
        assert len(drafts) == NUM_DRAFTS or topk > 1
    assert len(checked) >= 5
    engine.executor.close()


def test_what_has_no_such_layer_is_refused(checkpoint: Checkpoint) -> None:
    values: dict[str, Any] = json.loads((checkpoint.folder / "config.json").read_text())
    name = "mtp_num_hidden_layers" if isinstance(checkpoint, GatedCheckpoint) else "num_nextn_predict_layers"
    with pytest.raises(ConfigError, match=name):
        mtp_config(ModelConfig.from_dict(values | {name: 0}))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no layers that predict"):
        mtp_config(random_model("llama").config)
