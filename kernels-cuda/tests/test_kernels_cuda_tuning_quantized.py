"""What `quire tune` measures of a quantized checkpoint are the kernels that a server of it launches, no others.

In a process that does not interpret: what would be launched is recorded. The problems come from the checkpoint's
config.json; each is made into a call of its own on random weights, whose kernels must be those of the server's steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from quire_testkit.checkpoints import make_checkpoint

SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path

import torch

from quire.config import QuireConfig
from quire.kernel_list import list_problems, record_kernels
from quire_kernels_cuda.platform import NVIDIA
from quire_kernels_cuda.tuning import candidates, default_on, fitting, problem_builds
from quire_ops import kernel_builders
from quire_runner import captured_decode

root = Path(sys.argv[1])
builder, = (each for each in kernel_builders() if "sm_90" in each.targets)
captured_decode.WARM_UP_PROMPTS = ([1], [7])
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
CHANNEL = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {
    "group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}}}}
PRODUCTS = {"matmul_kernel", "expert_gate_kernel", "expert_down_kernel"}


def of_quantized(model, form, **settings):
    stored = json.loads((root / model / "config.json").read_text()) | {"quantization_config": form}
    (root / "quantized").mkdir(exist_ok=True)
    (root / "quantized" / "config.json").write_text(json.dumps(stored))
    return QuireConfig.of(model=str(root / "quantized"), max_model_len=64, max_num_seqs=2, **settings)


def products(builds):
    return [replace(build, name="") for build in builds if build.kernel.__name__ in PRODUCTS]


def check(name, model, form, target_name, forms, **settings):
    config, target = of_quantized(model, form, **settings), NVIDIA.targets[target_name]
    served = products(record_kernels(config, builder, target_name))
    problems = list_problems(config, target_name)
    assert all(1 < number <= 64 for _, number in problems), problems
    found = {dict(problem.traits)["form"] for problem, _ in problems if problem.kernel in ("matmul", "fused_moe")}
    assert found == forms, (name, found)
    measured = []
    for problem, _ in problems:
        if (default := default_on(problem, NVIDIA, target)) is not None:
            measured += products(problem_builds(problem, default, NVIDIA, target))
    others = [build for build in measured if build not in served]
    assert not others, (name, "is measured and not served", others[0])
    # A product with a bias takes the configuration of the one without, which differs by a sum at the end.
    has_bias = [build for build in served if build.kernel.__name__ == "matmul_kernel" and build.constants["HAS_BIAS"]]
    missing = [build for build in served if build not in measured and build not in has_bias]
    assert not missing, (name, "is served and not measured", missing[0])
    return [each for each, _ in problems if each.kernel == "matmul" and dict(each.traits)["form"] != "plain"]


quantized = check("GPTQ", "model", GPTQ, "sm_90", {"int4", "plain"})
check("GPTQ, 8 bits", "model", GPTQ | {"bits": 8}, "sm_80", {"int8", "plain"})
check("AWQ", "model", AWQ, "sm_90", {"int4", "plain"})
check("channels", "model", CHANNEL, "sm_90", {"int8", "plain"})
check("fp8, weights only", "model", {"quant_method": "fp8"}, "sm_80", {"fp8", "plain"})
check("fp8", "model", {"quant_method": "fp8"}, "sm_90", {"plain"})  # fp8_linear is not tuned
without = {"disabled_linear_kernels": ("block_linear",)}  # what stays in blocks is not tuned
check("MXFP4", "experts", {"quant_method": "mxfp4"}, "sm_90", {"int8", "plain"}, **without)

# What would be timed compiles, and holds what the checkpoint's form asks for.
problem, target = quantized[0], NVIDIA.targets["sm_90"]
configs = candidates(problem, default_on(problem, NVIDIA, target), target)[:3]
assert {config.blocks["BK"] for config in configs} == {128}, "int4 is packed by 128"
assert [fit.refusal for fit in fitting(problem, configs, NVIDIA, target)] == [None] * 3
"""


def test_problems_of_quantized_checkpoints_launch_what_is_served(tmp_path: Path) -> None:
    heads = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_checkpoint(
        tmp_path / "model", like="qwen3", num_hidden_layers=1, hidden_size=256, intermediate_size=512, **heads
    )
    make_checkpoint(tmp_path / "experts", like="gpt-oss", num_hidden_layers=1, intermediate_size=256)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "data pointer" not in done.stderr  # tensors without memory are not asked where they are
