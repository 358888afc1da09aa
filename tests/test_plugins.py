"""Examples of plug-ins work once their packages are installed, what is broken is named, the guide is complete."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, QuireConfig, SamplingParams
from quire.environment import unknown_variables
from quire.logits_processors import named_processors
from quire.setting_fields import config_fields
from quire_engine.messages import EngineReady, encode_message
from quire_interfaces import CheckpointError, ConfigError, LogitsProcessor
from quire_interfaces.platforms import platform_of
from quire_interfaces.plugins import GROUPS, OWN_PACKAGES, installed_plugins, plugins_of
from quire_kv_transfer.connector_config import ConnectorConfig
from quire_kv_transfer.connectors import check_connector
from quire_models import ModelConfig
from quire_ops import OpRequest, op_table, ops
from quire_renderers import ChatFormat, RendererConfig
from quire_server import cli
from quire_server.io_processors import load_io_processor
from quire_server.speech.diarizers import load_diarizer
from quire_server.terminal.collect_env import _accelerators, _plugins
from quire_testkit.checkpoints import checkpoint_config, make_checkpoint
from quire_testkit.conformance.logits_processor import LogitsProcessorSuite
from quire_testkit.plugin_packages import install_package, on_path, write_metadata

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "plugins"
PROMPT = [5 + number for number in range(64)]
ARCHITECTURE = "DampedLlamaForCausalLM"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all examples installed."""
    folder = tmp_path_factory.mktemp("site")
    for project in sorted(EXAMPLES.iterdir()):
        install_package(project, folder)
    return folder


@pytest.fixture(scope="module")
def twin_folder(damped_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network as Llama's: the damping is in its weights."""
    folder = tmp_path_factory.mktemp("twin") / "model"
    shutil.copytree(damped_folder, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**values, "architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    (weights,) = folder.glob("*.safetensors")
    tensors = {
        name: tensor * 0.5 if name.endswith("down_proj.weight") else tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(tensors, weights)
    return folder


@pytest.fixture
def installed(packages: Path) -> Iterator[None]:
    with on_path(packages):
        yield


@pytest.fixture(scope="module")
def damped_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint of a network that only the example knows."""
    folder = make_checkpoint(tmp_path_factory.mktemp("damped") / "model", dtype="float32", seed=3)
    values = json.loads((folder / "config.json").read_text())
    values |= {"architectures": [ARCHITECTURE], "model_type": "damped_llama", "damping": 0.5}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_command_with_a_setting(
    packages: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_GREETING", "Good evening")
    fields = config_fields(QuireConfig.sections())
    assert cli.main(["greet", "Ada"]) == 2
    assert "no command 'greet'" in capsys.readouterr().err
    assert "QUIRE_GREETING is not known" in unknown_variables(fields)[0]
    with on_path(packages):
        assert cli.main(["greet", "Ada"]) == 0
        assert capsys.readouterr().out == "Good evening, Ada.\n"
        assert cli.main(["help"]) == 0
        assert "greet" in capsys.readouterr().out
        assert unknown_variables(fields) == []


@pytest.mark.usefixtures("installed")
def test_a_network_a_kernel_a_tier_and_a_logits_processor_in_one_engine(damped_folder: Path, twin_folder: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)
    once = dataclasses.replace(greedy, extra_args={"logits_processors": ["no_repeats"]})
    settings: dict[str, Any] = {"max_model_len": 128, "num_threads": 1, "num_gpu_blocks_override": 12}
    tier = {"kv_connector": "DictConnector", "kv_connector_extra_config": {"num_blocks": 500}}
    with LLM(damped_folder, logits_processors=["no_repeats"], kv_transfer_config=tier, **settings) as llm:
        ours = llm.generate([PROMPT, PROMPT], [greedy, once])
        for start in range(200, 500, 100):  # together more blocks than the cache has
            llm.generate([list(range(start, start + 64))], greedy)
        again = llm.generate([PROMPT], greedy)[0]
    with LLM(twin_folder, **settings) as twin:
        expected = twin.generate([PROMPT], greedy)[0]
        for start in range(200, 500, 100):
            twin.generate([list(range(start, start + 64))], greedy)
        assert twin.generate([PROMPT], greedy)[0].num_cached_tokens == 0
    assert again.num_cached_tokens == 48
    first = ours[0].outputs[0]
    assert first.token_ids == expected.outputs[0].token_ids == again.outputs[0].token_ids
    assert logprobs_of(first) == pytest.approx(logprobs_of(expected.outputs[0]), abs=1e-5)
    kept = ours[1].outputs[0].token_ids
    assert len(set(kept)) == len(kept) == 12
    assert not set(kept) & set(PROMPT)
    assert op_table().report(ops.rms_norm, OpRequest()).backend == "engine_parts"


def logprobs_of(output: Any) -> list[float]:
    return [each.logprob for place in output.logprobs for each in place.values()]


@pytest.mark.usefixtures("installed")
def test_a_network_that_is_no_example_goes_its_own_way(damped_folder: Path) -> None:
    values = json.loads((damped_folder / "config.json").read_text())
    assert ModelConfig.from_dict(values).is_native
    del values["damping"]
    with pytest.raises(CheckpointError, match="damping"):
        ModelConfig.from_dict(values)
    assert not ModelConfig.from_dict({**values, "architectures": ["OtherForCausalLM"], "model_type": "x"}).is_native


@pytest.mark.usefixtures("installed")
def test_the_examples_keep_their_contracts() -> None:
    form = ChatFormat(tool_parser="arrow", reasoning_parser="musing")
    assert (form.tool_parser, form.reasoning_parser) == ("arrow", "musing")
    assert RendererConfig(tool_call_parser="arrow", reasoning_parser="musing").tool_call_parser == "arrow"
    assert isinstance(load_io_processor("greetings"), type)


NAMING_CUDA = {"device_timing.py", "direct_sums.py", "platforms.py", "profiler.py", "torch_distributed.py"}
"""Modules outside of the kernel packages that may name torch.cuda: the seam, and what is CUDA's own: a profiler, a
timer, NCCL and symmetric memory."""

MODULE = """
def fails(*arguments):
    raise OSError("no luck")

five = 5
"""

ASKED: dict[str, Callable[[str], object]] = {
    "quire.commands": lambda name: cli._run_plugin(name, []),
    "quire.diarizers": load_diarizer,
    "quire.io_processors": load_io_processor,
    "quire.kv_connectors": lambda name: check_connector(ConnectorConfig(kv_connector=name)),
    "quire.logits_processors": lambda name: named_processors([name], None),
    "quire.models": lambda name: ModelConfig.from_dict({**checkpoint_config("llama", "tiny"), "architectures": [name]}),
    "quire.ops": lambda name: op_table(),
    "quire.platforms": platform_of,
    "quire.reasoning_parsers": lambda name: ChatFormat(reasoning_parser=name),
    "quire.settings": lambda name: unknown_variables({}, {"QUIRE_NOTHING_KNOWN": "1"}),
    "quire.tool_parsers": lambda name: ChatFormat(tool_parser=name),
}
"""Group -> what asks for a plug-in of a name."""
UNNAMED = {"quire.settings", "quire.ops", "quire.commands", "quire.models"}
"""Groups of which nobody asks for one by its name, or where a name may be of something else."""


@pytest.mark.parametrize("group", ASKED)
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("no_such_module:thing", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken_module:nothing", "cannot be loaded: AttributeError"),
        ("broken_module:five", "must be .* type int"),
        ("twice", "two packages have a plug-in 'broken' .*: broken-one 1.0 .* and broken-two 1.0"),
    ],
)
def test_what_is_broken_is_named_with_package_and_group(group: str, place: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text(MODULE)
    write_metadata(tmp_path, "broken-one", {group: {"broken": place}})
    if place == "twice":
        write_metadata(tmp_path, "broken-two", {group: {"broken": "other_module:thing"}})
    with on_path(tmp_path), pytest.raises(ConfigError, match=words) as caught:
        ASKED[group]("broken")
    assert group in str(caught.value)
    assert "broken-one" in str(caught.value)


@pytest.mark.parametrize("group", [group for group in ASKED if group not in UNNAMED])
def test_names_that_nobody_has(group: str) -> None:
    with pytest.raises(ConfigError, match="missing"):
        ASKED[group]("missing")


def test_only_what_quire_plugins_names_is_used(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_path(packages):
        everything = {group: set(installed_plugins(group)) for group in GROUPS}
        assert all(everything.values()), "each group has an example"
        monkeypatch.setenv("QUIRE_PLUGINS", "quire-dialect, greet")
        assert installed_plugins("quire.tool_parsers").keys() == {"arrow"}
        assert "greet" in installed_plugins("quire.commands")
        assert "verify" in installed_plugins("quire.commands"), "Quire's own are always found"
        assert not installed_plugins("quire.models")
        assert op_table().report(ops.rms_norm, OpRequest()).backend != "engine_parts"
        with pytest.raises(ConfigError, match=r"quire-engine-parts 0\.1\.0 has it, and QUIRE_PLUGINS does not name"):
            named_processors(["no_repeats"], None)
        monkeypatch.setenv("QUIRE_PLUGINS", "")
        with pytest.raises(ConfigError, match=r"quire-dialect 0\.1\.0 has it, and QUIRE_PLUGINS does not name"):
            RendererConfig(tool_call_parser="arrow")
        assert {name for group in GROUPS for name in installed_plugins(group)} == {
            plugin.name for group in GROUPS for plugin in plugins_of(group) if plugin.package in OWN_PACKAGES
        }


@pytest.mark.usefixtures("installed")
def test_a_platform(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "model", dtype="bfloat16", seed=4)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    settings: dict[str, Any] = {"max_model_len": 256, "num_threads": 1}
    with LLM(folder, device="slate", **settings) as llm:
        info = llm.engine_info
        ours = llm.generate([PROMPT], params)[0].outputs[0].token_ids
    assert (info.device, info.choices["device"]) == ("slate", "a slate of 64 MiB")
    assert encode_message(EngineReady(info=info)), "servers are told by the engine's process"
    assert (info.dtype, info.choices["attention"]) == ("float32", "reference")
    assert 31 << 20 < sum(info.memory_bytes.values()) <= 32 << 20, "half of its memory, as by default on a CPU"
    with LLM(folder, dtype="float32", attention_backend="reference", num_gpu_blocks_override=32, **settings) as plain:
        assert plain.generate([PROMPT], params)[0].outputs[0].token_ids == ours
    assert cli.main(["plan", str(folder), "--device", "slate", "--max-model-len", "256"]) == 0
    assert "on slate" in capsys.readouterr().out
    assert _accelerators()["slate:0"] == "a slate of 64 MiB"
    with pytest.raises(ConfigError, match="device slate computes in float32, not in bfloat16"):
        LLM(folder, device="slate", dtype="bfloat16", **settings)


@pytest.mark.usefixtures("installed")
def test_collect_env_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PLUGINS", "arrow")
    facts = _plugins()
    assert facts["quire.tool_parsers"] == "arrow (quire-dialect 0.1.0)"
    assert facts["quire.commands"] == "greet (quire-greeting 0.1.0; QUIRE_PLUGINS does not name it)"


def test_logits_processors_by_import_path(packages: Path) -> None:
    with on_path(packages):
        path = "quire_engine_parts.no_repeats:NoRepeats"
        (found,) = (named_processors([path], None) or {}).values()
        assert type(found).__name__ == "NoRepeats"
        with pytest.raises(ConfigError, match="cannot be imported: AttributeError"):
            named_processors(["quire_engine_parts.no_repeats:Nothing"], None)


class TestNoRepeats(LogitsProcessorSuite):
    def make_processor(self) -> LogitsProcessor:
        with on_path(EXAMPLES / "quire-engine-parts" / "src"):
            (found,) = (named_processors(["quire_engine_parts.no_repeats:NoRepeats"], None) or {}).values()
        return found


def test_the_lists_are_of_today() -> None:
    sources = [path for folder in ("packages", "apps") for path in (ROOT / folder).glob("*/src/**/*.py")]
    assert [path.name for path in sources if re.search(r"[^_\w]entry_points\(", path.read_text())] == ["plugins.py"]
    assert {path.name for path in sources if "torch.cuda" in path.read_text()} == NAMING_CUDA
    projects = [*ROOT.glob("*/*/pyproject.toml"), *ROOT.glob("kernels-*/pyproject.toml")]
    tables = [tomllib.loads(path.read_text())["project"] for path in projects]
    assert {table["name"] for table in tables if "entry-points" in table} == OWN_PACKAGES
    page = (ROOT / "docs" / "plugins.md").read_text()
    assert set(re.findall(r"^\| `(quire\.\w+)` \|", page, re.MULTILINE)) == GROUPS.keys() == ASKED.keys()
    for project in EXAMPLES.iterdir():
        assert f"examples/plugins/{project.name}" in page
