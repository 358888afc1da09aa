"""Kernels compiled without a GPU are what a process with one finds: keys, moves, damage, several writers.

What has a GPU is a process whose driver says so: Triton's own way from a launch to the compiled kernel runs, all but
the launch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from quire_testkit.checkpoints import make_checkpoint

SCRIPT = """
import json, shutil, sys, threading
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from quire_interfaces import ConfigError
from quire_kernels_cuda.kernel_folder import MANIFEST, seal
from quire_kernels_cuda.triton.norms import rms_norm
from quire_ops import kernel_builders

def norm(device, dtype=torch.float32):
    x = torch.ones(4, 64, dtype=dtype, device=device)
    rms_norm(x, x[0].clone(), 1e-6)

root = Path(sys.argv[1])
triton.knobs.cache.dir = str(root / "elsewhere")
builder, = (each for each in kernel_builders() if "sm_90" in each.targets)
with builder.recording("sm_90") as kernels:
    norm("meta")
    norm("meta", torch.bfloat16)
assert len(kernels) == 2, kernels
assert builder.build(kernels[:1], "sm_90", root / "made", num_processes=1) == 1
for kernel in (build.kernel for build in kernels):
    kernel.device_caches.clear()
assert builder.build(kernels[:1], "sm_90", root / "made", num_processes=1) == 0
assert str(root) not in "".join(path.read_text() for path in (root / "made").glob("*/__grp__*"))
writers = [threading.Thread(target=seal, args=(root / "made", name)) for name in ("sm_80", "sm_100") * 4]
[writer.start() for writer in writers], [writer.join() for writer in writers]
assert json.loads((root / "made" / MANIFEST).read_text())["targets"] == ["sm_100", "sm_80", "sm_90"]
shutil.move(root / "made", root / "shipped")

# GPUs with names of their own within a family have binaries of their own.
with builder.recording("sm_86") as found:
    norm("meta")
builder.build(found, "sm_86", root / "of_86", num_processes=1)
metadata, = (path for path in (root / "of_86").glob("*/*.json") if not path.name.startswith("__grp__"))
assert json.loads(metadata.read_text())["target"]["arch"] == 86

# A whole model: all sizes of steps are covered by those that are rehearsed.
from quire.config import QuireConfig
from quire.kernel_list import compile_kernels, list_problems, record_kernels
from quire_runner import captured_decode

def listed(**settings):
    config = QuireConfig.of(model=str(root / "model"), max_model_len=2048, max_num_seqs=3, **settings)
    return record_kernels(config, builder, "sm_90")

with_all = listed()
names = {build.kernel.__name__ for build in with_all}
assert names >= {"attend_tiles", "look_kernel", "draw_kernel", "best_token_kernel", "tokens_kernel",
                 "matmul_kernel", "rms_norm_kernel", "gate_kernel", "rotate_and_write_kernel",
                 "embedding_kernel"}, names
assert not names & {"write_kv_cache_kernel", "rotary_kernel"}, "what is one kernel needs no others"
assert {build.constants["IS_SPLIT"] for build in with_all if build.kernel.__name__ == "attend_tiles"} == {True, False}
captured_decode.WARM_UP_PROMPTS = ([7], [31], [57, 1, 1], [1000])
others = listed(cuda_graph_sizes=(3,))
assert len(others) > 10
missing = [build for build in others if build not in with_all]
assert not missing, missing
problems = list_problems(QuireConfig.of(model=str(root / "model"), max_num_seqs=3), "sm_90")
assert {problem.kernel for problem, _ in problems} == {
    "decode_attention", "prefill_attention", "matmul", "skinny_matmul", "gated_matmul"}
assert len({str(problem) for problem, _ in problems}) == len(problems) and all(1 < tried <= 64 for _, tried in problems)
try:
    compile_kernels(QuireConfig(), "sm_70", None)
except ConfigError as error:
    assert "nothing here compiles kernels for 'sm_70'; choose one of sm_80, sm_89, sm_90" in str(error)
else:
    raise AssertionError
(root / "quantized").mkdir()
def of_quantized(model, form, **settings):
    stored = json.loads((root / model / "config.json").read_text()) | {"quantization_config": form}
    (root / "quantized" / "config.json").write_text(json.dumps(stored))
    config = QuireConfig.of(model=str(root / "quantized"), max_model_len=256, max_num_seqs=2, **settings)
    return record_kernels(config, builder, "sm_90")

captured_decode.WARM_UP_PROMPTS = ([7],)
found = of_quantized("model", {"quant_method": "fp8"}, kv_cache_dtype="fp8_e4m3")
assert "fp8_kernel" in {build.kernel.__name__ for build in found}
cached = [build for build in found if build.kernel.__name__ == "attend_tiles"]
assert {build.constants["HAS_KV_SCALE"] for build in cached} == {False, True}, "the files say which"
found = of_quantized("experts", {"quant_method": "mxfp4"})
in_blocks = {build.kernel.__name__ for build in found if build.constants.get("FORM") == "MXFP4"}
assert in_blocks == {"expert_gate_kernel", "expert_down_kernel"}
found = of_quantized("experts", {"quant_method": "mxfp4"}, disabled_linear_kernels=("block_linear",))
products = [build for build in found if build.constants.get("FORM") == "int8"]
assert {build.signature["scale_like"] for build in products} == {"*bf16", "*fp32"}
assert {build.kernel.__name__ for build in products} == {"expert_gate_kernel", "expert_down_kernel"}
try:
    of_quantized("experts", {"quant_method": "mxfp4"}, disabled_linear_kernels=("fused_moe",))
except ConfigError as error:
    assert "its experts are run by each_expert (fused_moe: disabled)" in str(error)
else:
    raise AssertionError

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

triton.runtime.driver.set_active(Driver())
run = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **more: run(self, *args, grid=grid, warmup=True, **more)
builder.use(root / "shipped")
assert builder.count_compilations() == {}
norm("cpu")
assert builder.count_compilations() == {}, "a kernel that was shipped is compiled"
norm("cpu", torch.bfloat16)
assert builder.count_compilations() == {"rms_norm_kernel": 1}
binary, = (root / "shipped").glob("*/*.cubin")
binary.write_bytes(b"damaged")
builder.use(root / "shipped")
for kernel in (build.kernel for build in kernels):
    kernel.device_caches.clear()
norm("cpu")
assert builder.count_compilations() == {"rms_norm_kernel": 2}

def refusal(change):
    change(root / "shipped" / MANIFEST)
    try:
        builder.use(root / "shipped")
    except ConfigError as error:
        return str(error)

older = json.dumps({"triton": "3.0.0", "files": {}})
assert "compiled by Triton 3.0.0" in refusal(lambda path: path.write_text(older))
assert "is damaged" in refusal(lambda path: path.write_text("{"))
assert "is no folder of kernels" in refusal(lambda path: path.unlink())
"""


def run(script: str, *arguments: Path, folder: Path) -> str:
    """In a process that does not interpret."""
    path = folder / "script.py"
    path.write_text(script)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, path, *arguments], env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_kernels_are_listed_compiled_shipped_and_found(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", like="qwen3", num_hidden_layers=1)
    make_checkpoint(tmp_path / "experts", like="gpt-oss", num_hidden_layers=1, intermediate_size=256)
    said = run(SCRIPT, tmp_path, folder=tmp_path)
    assert said.count("kernel rms_norm_kernel was compiled while serving") == 2
    assert "is damaged, and is compiled anew" in said
