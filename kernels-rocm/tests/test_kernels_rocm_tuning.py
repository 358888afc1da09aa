"""Tuning for AMD GPUs with none: what would be tried, what their limits leave, and tables by the names of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from quire_testkit.checkpoints import make_checkpoint

SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path

import torch

from quire.kernel_builds import use_kernel_tables
from quire.config import QuireConfig
from quire.kernel_list import list_problems, record_kernels
from quire_interfaces import ConfigError
from quire_kernels_cuda.tuned import Entry, LaunchConfig, save
from quire_kernels_cuda.tuning import candidates, default_on, fitting
from quire_kernels_rocm.platform import AMD
from quire_ops import kernel_builders
from quire_runner import captured_decode
from quire_server.cli import main

root = Path(sys.argv[1])
captured_decode.WARM_UP_PROMPTS = ([1], [7])
builder, = (each for each in kernel_builders() if "gfx942" in each.targets)
target = AMD.targets["gfx942"]
flags = ["--max-model-len", "64", "--max-num-seqs", "2"]
assert main(["tune", str(root / "model"), "--list", "gfx942", *flags]) == 0

config = QuireConfig.of(model=str(root / "model"), max_model_len=64, max_num_seqs=2)
problem = next(each for each, _ in list_problems(config, "gfx942") if each.kernel == "decode_attention")
default = default_on(problem, AMD, target)
found = candidates(problem, default, target)
assert found[0] == default and len(found) > 8
assert {each.num_stages for each in found} == {1, 2}, "loads are not as far ahead as on NVIDIA's"

too_much = LaunchConfig(blocks={"BM": 64, "BN": 256, "BK": 256, "SPLITS": 1}, num_warps=8, num_stages=2)
product = next(each for each, _ in list_problems(config, "gfx942") if each.kernel == "matmul")
product = product._replace(sizes=(("rows", 64), ("outputs", 1024), ("inputs", 1024)))
fits = fitting(product, [default_on(product, AMD, target), too_much], AMD, target)
assert fits[0].refusal is None, fits[0]
assert "bytes of shared memory, there are 65536" in fits[1].refusal, fits[1]

# A table of the GPU decides, where it is named, and nothing else's.
def blocks(gpu):
    kernels = record_kernels(config, builder, "gfx942", gpu)
    return {build.constants["BLOCK_N"] for build in kernels
            if build.kernel.__name__ == "attend_tiles" and build.constants["BLOCK_Q"] == 1}

before = blocks(None)
other = replace(default, blocks={"BLOCK_N": 16})
assert before and 16 not in before
assert AMD.tables.describe("instinct-mi300x").startswith("from a model of the limits of instinct-mi300x")
save(root / "tables", "instinct-mi300x", [Entry(problem, other, 10.0, 12.0, "3.9.0")])
use_kernel_tables(replace(config, runner=replace(config.runner, kernel_tables=str(root / "tables"))))
assert blocks("instinct-mi300x") == {16}
assert blocks("instinct-mi325x") == blocks(None) == before
assert "1 measured on instinct-mi300x with Triton 3.9.0" in AMD.tables.describe("instinct-mi300x")

if torch.version.hip is None:
    assert builder.configurations() is None
    try:
        next(builder.tune([problem], None, num_processes=1, context=16))
    except ConfigError as error:
        assert "timed on a GPU, and there is none here: this build of torch is not for AMD GPUs" in str(error)
    else:
        raise AssertionError
"""


def test_amd_gpus_are_tuned_for_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", like="qwen3", num_hidden_layers=1)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, path, tmp_path], env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "configurations of decode_attention" in done.stdout
    assert "each starts from what a model of the limits of gfx942 says" in done.stdout
