"""Platforms: what they call their devices, what they say of memory, and how tensors reach them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from quire_interfaces import ConfigError
from quire_interfaces.platforms import CPU, CUDA, ROCM, Platform, platform_of, platform_of_type
from quire_ops import torch_device

MODULE = """
class Properties:
    name, total_memory = "Ink 2", 3 << 30

def is_available():
    return True

def device_count():
    return 2

def mem_get_info(device):
    if not device.endswith((":0", ":1")):
        raise RuntimeError("invalid device ordinal")
    return (1 << 30) + int(device[-1]), 3 << 30

def get_device_properties(index):
    return Properties
"""


@pytest.fixture
def ink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    (tmp_path / "ink_runtime.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ink_runtime", raising=False)
    return Platform(name="ink", device_type="privateuseone", module="ink_runtime")


def test_those_that_are_built_in() -> None:
    assert (platform_of("cpu"), platform_of("cuda:1"), platform_of("rocm")) == (CPU, CUDA, ROCM)
    assert (platform_of_type("cpu"), platform_of_type("cuda"), platform_of_type("meta")) == (CPU, CUDA, CPU)
    assert CPU.is_host
    assert not CUDA.is_host
    assert (torch_device("cpu"), torch_device("cuda:1"), torch_device("rocm:1")) == (
        torch.device("cpu"),
        torch.device("cuda:1"),
        torch.device("cuda:1"),
    )
    assert CPU.free_bytes("cpu") is None
    assert CPU.devices() == {}


@pytest.mark.parametrize("name", ["gpu", "cuda:x", ""])
def test_what_is_no_device_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="device must be") as caught:
        torch_device(name)
    assert caught.value.field == "device"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("platform", "words"), [(CUDA, "torch finds no device 'cuda' here"), (ROCM, "not for AMD GPUs|no device 'rocm'")]
)
def test_gpus_that_are_not_here(platform: Platform, words: str) -> None:
    assert platform.devices() == {}
    with pytest.raises(ConfigError, match=words):
        platform.free_bytes(platform.name)


def test_a_device_is_asked_through_its_module(ink: Platform) -> None:
    assert ink.torch_device("ink:1") == "privateuseone:1"
    assert ink.free_bytes("ink:1") == (1 << 30) + 1
    assert ink.devices() == {"ink:0": "Ink 2, 3.0 GiB", "ink:1": "Ink 2, 3.0 GiB"}
    assert (ink.description("ink"), ink.description("ink:7")) == ("Ink 2, 3.0 GiB", "not here")
    with pytest.raises(ConfigError, match=r"invalid device ordinal; the devices are ink:0 to ink:1"):
        ink.free_bytes("ink:2")
