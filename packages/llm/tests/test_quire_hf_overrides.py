"""`hf_overrides` reaches everything that reads config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire_demo_model import checkpoint_path
from quire_interfaces import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SMALL = {"num_gpu_blocks_override": 256, "max_num_seqs": 4, "dtype": "float32"}
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 512}
OVERRIDES = {"rope_scaling": YARN, "rope_theta": 20000.0, "max_position_embeddings": 1024, "eos_token_id": 5}


def token_ids(llm: LLM) -> list[int]:
    (output,) = llm.generate("The quick brown fox", GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_an_overridden_model_is_the_model_with_another_config_json(tmp_path: Path) -> None:
    edited = shutil.copytree(checkpoint_path(), tmp_path / "edited")
    values = json.loads((edited / "config.json").read_text())
    (edited / "config.json").write_text(json.dumps({**values, **OVERRIDES}))
    with LLM(str(edited), **SMALL) as expected, LLM(hf_overrides=OVERRIDES, **SMALL) as llm, LLM(**SMALL) as plain:
        assert llm.model_config.rope == expected.model_config.rope != plain.model_config.rope
        assert llm.engine_info.max_model_len == expected.engine_info.max_model_len == 1536
        assert 5 in llm._eos_token_ids
        assert 5 not in plain._eos_token_ids
        assert token_ids(llm) == token_ids(expected) != token_ids(plain)


def test_a_field_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'rope_tetha', which LlamaForCausalLM does not read .* 'rope_theta'"):
        LLM(hf_overrides={"rope_tetha": 1e6})
    with pytest.raises(ConfigError, match=r"hf_overrides must be an object, got 4"):
        LLM(hf_overrides=4)
