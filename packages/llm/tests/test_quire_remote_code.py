"""Checkpoints that bring code of their own: run where the user trusts it, else refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from quire import LLM, SamplingParams
from quire.assemble import model_folder
from quire.config import ModelSettings, QuireConfig
from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model
from quire_models.transformers_backend.config import FallbackSpec
from quire_renderers import load_tokenizer
from quire_testkit.parity.case import LLAMA_FIELDS

CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODELING = """
from torch import nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].mlp.act_fn = nn.Tanh()
"""
TOKENIZATION = """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    def __init__(self, **options):
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(200)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        options.pop("tokenizer_object", None)
        super().__init__(tokenizer_object=words, **options)
"""
PYTHON_TOKENIZATION = """
from transformers import PreTrainedTokenizer

class OwnTokenizer(PreTrainedTokenizer):
    @property
    def vocab_size(self):
        return 200

    def get_vocab(self):
        return {f"w{i}": i for i in range(200)}

    def _convert_token_to_id(self, token):
        return 0

    def _convert_id_to_token(self, index):
        return f"w{index}"
"""
AUTO_MAP = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
SETTINGS: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 64, "dtype": "float32"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose network and tokenizer are Python files in it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA_FIELDS))
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": AUTO_MAP}
    (folder / "config.json").write_text(json.dumps(values))
    for name, text in (("configuration", CONFIGURATION), ("modeling", MODELING), ("tokenization", TOKENIZATION)):
        (folder / f"{name}_own.py").write_text(text)
    settings = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_trusted_code_runs(own: Path) -> None:
    import transformers

    oracle = transformers.AutoModelForCausalLM.from_pretrained(own, trust_remote_code=True)
    prompt = [7, 9, 30, 100, 41]
    with torch.inference_mode():
        expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    with LLM(str(own), trust_remote_code=True, **SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate([prompt, " ".join(f"w{token}" for token in prompt)], params, use_tqdm=False)
        assert [list(each.outputs[0].token_ids) for each in outputs] == [expected[0, len(prompt) :].tolist()] * 2
        report = llm.engine_info.choices
    assert report["network"].startswith("code of the checkpoint")
    assert report["remote code"].startswith("trusted")


def test_trusted_code_drafts(own: Path) -> None:
    draft = {"speculative_method": "draft_model", "speculative_model": str(own), "num_speculative_tokens": 2}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(own), trust_remote_code=True, **SETTINGS) as llm:
        expected = llm.generate([[7, 9, 30]], params, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(str(own), trust_remote_code=True, **draft, **SETTINGS) as llm:
        assert llm.generate([[7, 9, 30]], params, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_code_is_not_run_unasked(own: Path) -> None:
    (own / "modeling_own.py").write_text("raise SystemExit('run')")
    (own / "tokenization_own.py").write_text("raise SystemExit('run')")
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        LLM(str(own), **SETTINGS)
    with pytest.raises(CheckpointError):
        load_tokenizer(own)


@pytest.mark.parametrize("name", ["somebody/else--modeling_own.OwnForCausalLM", None])
def test_code_of_other_repositories_is_refused(own: Path, name: str | None) -> None:
    values = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**values, "auto_map": {"AutoModelForCausalLM": name}}))
    with pytest.raises(CheckpointError, match="auto_map must name a file of this folder"):
        ModelConfig.from_path(own, trust_remote_code=True)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_tokenizers_of_other_repositories_are_refused(own: Path, file: str) -> None:
    values = json.loads((own / file).read_text())
    code = {"AutoTokenizer": [None, "somebody/else--tokenization_own.OwnTokenizer"]}
    (own / file).write_text(json.dumps({**values, "auto_map": code}))
    with pytest.raises(CheckpointError, match=r"auto_map names code of another repository \(somebody/else"):
        load_tokenizer(own, trust_remote_code=True)


def test_tokenizer_in_python_is_refused_by_kind(own: Path) -> None:
    (own / "tokenization_own.py").write_text(PYTHON_TOKENIZATION)
    with pytest.raises(CheckpointError, match=r"OwnTokenizer\) is written in Python"):
        load_tokenizer(own, trust_remote_code=True)


def test_code_beside_a_class_of_transformers_is_not_run(own: Path) -> None:
    values = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**values, "architectures": ["CwmForCausalLM"], "model_type": "cwm"}))
    for trust_remote_code in (False, True):
        spec = ModelConfig.from_path(own, trust_remote_code=trust_remote_code).network
        assert spec.built_by == FallbackSpec.built_by


def test_quantized_code_is_copied_once(own: Path, tmp_path: Path) -> None:
    values = json.loads((own / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (own / "config.json").write_text(json.dumps({**values, "quantization_config": quantization}))
    for file in own.glob("*.safetensors"):
        file.unlink()
    model = ModelConfig.from_path(own, trust_remote_code=True)
    for _ in range(2):
        load_model(model, own, dtype="float32", load_format="dummy")
    copies = {path.parent for path in (tmp_path / "modules").rglob("modeling_own.py")}
    assert len(copies) == 1


def test_code_that_fails_is_named(own: Path) -> None:
    (own / "modeling_own.py").write_text("import nothing_of_this_name_anywhere")
    with pytest.raises(CheckpointError, match=r"own code \(modeling_own\.OwnForCausalLM\) cannot be loaded"):
        LLM(str(own), trust_remote_code=True, **SETTINGS)


@pytest.mark.parametrize("trusted", [False, True])
def test_downloads_have_code_only_where_it_is_trusted(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub of one repository gives the files that are asked for."""
    published = ["config.json", "model.safetensors", "tokenizer.json", "modeling_own.py", "own.tiktoken"]

    def download(name: str, *, revision: str | None, allow_patterns: list[str], **_: object) -> str:
        assert name == "owner/name"
        for file in filter_repo_objects(published, allow_patterns=allow_patterns):
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = model_folder(QuireConfig(model=ModelSettings(model="owner/name", trust_remote_code=trusted)))
    assert sorted(file.name for file in folder.iterdir()) == sorted(published if trusted else published[:3])
