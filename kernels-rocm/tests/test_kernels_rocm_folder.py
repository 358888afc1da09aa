"""Kernels compiled for an AMD GPU without one are what a process with one finds, however much memory it has.

What has a GPU is a process whose driver says so: Triton's own way from a launch to the compiled kernel runs, on tensors
of the CPU whose memory is as large as the network's, all but the launch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from quire_testkit.checkpoints import make_checkpoint

SCRIPT = """
import json, sys
from collections import Counter
from pathlib import Path
import torch, triton
from torch._subclasses.fake_tensor import unset_fake_temporarily
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from quire import kernel_list
from quire.config import QuireConfig
from quire_interfaces import ConfigError
from quire_kernels_cuda.kernel_folder import MANIFEST
from quire_kernels_cuda.ops import op_backends
from quire_kernels_cuda.platform import pretending
from quire_kernels_cuda.recording import recording
from quire_kernels_cuda.triton.norms import rms_norm
from quire_kernels_rocm.platform import AMD
from quire_ops import ops, OpRequest, kernel_builders
from quire_ops.backends import op_table, replaced_backends
from quire_runner import captured_decode
from quire_server.cli import main

MACHINES = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx1101": 0x46}  # of the LLVM AMDGPU backend's ELF header, e_flags
root = Path(sys.argv[1])
captured_decode.WARM_UP_PROMPTS = ([1], [7])


class Driver:
    def __init__(self, arch, warp_size):
        self.arch, self.warp_size = arch, warp_size

    def get_current_target(self):
        return GPUTarget("hip", self.arch, self.warp_size)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def in_memory(value):
    "What a launch with these tensors of a GPU would look at: an address, and how much memory there is behind it."
    if not isinstance(value, torch.Tensor):
        return value
    with unset_fake_temporarily():
        memory = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8)  # never written, so never there
        of_dtype = torch.empty(0, dtype=value.dtype)
        return of_dtype.set_(memory.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def machine_of(binary):
    header = binary.read_bytes()[:64]
    assert header[:4] == b"\\x7fELF" and int.from_bytes(header[18:20], "little") == 224  # EM_AMDGPU
    return header[48]


def steps_on_a_gpu(config, num_blocks):
    "The rehearsal with which a server starts on a GPU that has so many blocks of KV cache."
    run = JITFunction.run

    def launch(self, *args, grid, warmup, **more):
        args, more = [in_memory(each) for each in args], {name: in_memory(each) for name, each in more.items()}
        return run(self, *args, grid=grid, warmup=True, **more)

    target = AMD.targets["gfx942"]
    JITFunction.run = launch
    try:
        with pretending(target), replaced_backends(op_backends("triton-rocm", AMD, None, target=target)):
            kernel_list._warm_up(config, num_blocks)
    finally:
        JITFunction.run = run


def test():
    triton.knobs.cache.dir = str(root / "elsewhere")
    builder, = (each for each in kernel_builders() if "gfx942" in each.targets)
    flags = ["--max-model-len", "64", "--max-num-seqs", "2"]
    command = ["compile-kernels", str(root / "model"), "--out", str(root / "shipped"), "--jobs", "2", *flags]
    assert main([*command, "--target", "gfx942"]) == 0
    assert {machine_of(path) for path in (root / "shipped").glob("*/*.hsaco")} == {MACHINES["gfx942"]}
    config = QuireConfig.of(model=str(root / "model"), max_model_len=64, max_num_seqs=2)
    kernels = kernel_list.record_kernels(config, builder, "gfx942")
    assert json.loads((root / "shipped" / MANIFEST).read_text())["targets"] == ["gfx942"]
    of_large_caches = Counter(build.kernel.__name__ for build in kernels if len(build.short) < sum(
        kind.startswith("*") for kind in build.signature.values()))
    assert set(of_large_caches) == {"attend_tiles", "rotate_and_write_kernel"}, of_large_caches

    # One kernel for a GPU that has a name of its own within its family, and for one of another generation.
    for name in ("gfx1101", "gfx90a"):
        with builder.recording(name) as found:
            x = torch.empty(4, 64, device="meta")
            rms_norm(x, x[0].clone(), 1e-6)
        builder.build(found, name, root / name, num_processes=1)
        assert {machine_of(path) for path in (root / name).glob("*/*.hsaco")} == {MACHINES[name]}

    # What else is installed has nothing for it.
    with builder.recording("gfx942"):
        report = op_table().report(ops.rms_norm, OpRequest(device="cuda"))
        assert report.backend == "triton-rocm" and report.refused["triton"] == "has no kernels for gfx942"

    for build in kernels:
        build.kernel.device_caches.clear()
    triton.runtime.driver.set_active(Driver("gfx942", 64))
    builder.use(root / "shipped")
    assert builder.count_compilations() == {}
    steps_on_a_gpu(config, 100)
    steps_on_a_gpu(config, 1 << 23)
    assert builder.count_compilations() == {}, "a kernel that was shipped is compiled"
    others = [each for each in kernel_builders() if each is not builder]
    assert [dict(each.count_compilations()) for each in others] == [{}]

    # A list that knows small caches only leaves large ones to be compiled there, each counted once.
    builder.build([build for build in kernels if "cache" in build.short or "cache" not in build.signature],
                  "gfx942", root / "small", num_processes=1)
    for build in kernels:
        build.kernel.device_caches.clear()
    triton.knobs.cache.dir = str(root / "third")
    builder.use(root / "small")
    steps_on_a_gpu(config, 100)
    assert builder.count_compilations() == {}
    steps_on_a_gpu(config, 1 << 23)
    assert builder.count_compilations() == of_large_caches, builder.count_compilations()
    print("compiled", of_large_caches.total())

    manifest = json.loads((root / "shipped" / MANIFEST).read_text())
    (root / "shipped" / MANIFEST).write_text(json.dumps(manifest | {"build": "another"}))
    try:
        builder.use(root / "shipped")
    except ConfigError as error:
        assert "compiled by another build of Triton" in str(error)
    else:
        raise AssertionError


if __name__ == "__main__":
    test()
"""


def test_kernels_for_amd_are_compiled_shipped_and_found(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", like="qwen3", num_hidden_layers=1)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, path, tmp_path], env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "for gfx942" in done.stdout
    assert f"compiled {done.stderr.count('was compiled while serving')}\n" in done.stdout  # each said once
