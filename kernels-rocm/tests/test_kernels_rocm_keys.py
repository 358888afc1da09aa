"""Of every kind of network, what is listed for an AMD GPU has the keys that launches on it look up.

Nothing is compiled: Triton's own way from a launch to a key runs, once for what is listed, once for the steps that a
server rehearses, on tensors that have the addresses and the memory of the network's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from quire_testkit.checkpoints import make_checkpoint

LATENT = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16",
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 1024, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "tie_word_embeddings": False,
}  # fmt: skip

SCRIPT = """
import mmap, sys
from dataclasses import replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from triton.runtime.jit import JITFunction

from quire import kernel_list
from quire.config import QuireConfig
from quire_interfaces import ConfigError
from quire_kernels_cuda.launch_build import build_as_launched, driver_of
from quire_kernels_cuda.ops import op_backends
from quire_kernels_cuda.platform import NVIDIA, pretending
from quire_kernels_rocm.platform import AMD
from quire_ops import kernel_builders
from quire_ops.backends import replaced_backends
from quire_runner import captured_decode

root = Path(sys.argv[1])
captured_decode.WARM_UP_PROMPTS = ([1], [7], [16, 1])
MAP_NORESERVE = 0x4000  # of Linux; never written, so never there
PLATFORMS = {"gfx942": ("triton-rocm", AMD), "gfx1100": ("triton-rocm", AMD), "sm_90": ("triton", NVIDIA)}


def in_memory(value):
    if not isinstance(value, torch.Tensor):
        return value
    num_bytes = value.untyped_storage().nbytes()
    with unset_fake_temporarily():
        memory = torch.empty(0, dtype=torch.uint8)
        if num_bytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            memory = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)
        of_dtype = torch.empty(0, dtype=value.dtype)
        return of_dtype.set_(memory.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def keys_of(work):
    "Hashes of source, types, constants, hints and options: what of a key depends on the launch."
    found = {}

    def compile(self, key, signature, device, constexprs, options, attrs, warmup):
        source = self.ASTSource(self, signature, constexprs, attrs)
        found[source.hash(), options.hash()] = self.__name__

    before, JITFunction._do_compile = JITFunction._do_compile, compile
    try:
        work()
    finally:
        JITFunction._do_compile = before
    return found


def steps(config, num_blocks, name, platform, target):
    run = JITFunction.run

    def launch(self, *args, grid, warmup, **more):
        named = {name: in_memory(value) for name, value in more.items()}
        return run(self, *map(in_memory, args), grid=grid, warmup=True, **named)

    JITFunction.run = launch
    try:
        with pretending(target), replaced_backends(op_backends(name, platform, None, target=target)), driver_of(target):
            kernel_list._warm_up(config, num_blocks)
    finally:
        JITFunction.run = run


def build(kernels, target):
    with driver_of(target):
        for kernel in kernels:
            build_as_launched(kernel)


def check(model, target_name, **settings):
    name, platform = PLATFORMS[target_name]
    target = platform.targets[target_name]
    config = QuireConfig.of(model=str(root / model), max_model_len=64, max_num_seqs=2, **settings)
    builder, = (each for each in kernel_builders() if target_name in each.targets)
    kernels = kernel_list.record_kernels(config, builder, target_name)
    listed = keys_of(lambda: build(kernels, target))
    assert len(listed) == len(kernels) > 15
    launched = {}
    for num_blocks in (300, 1 << 23):
        launched |= keys_of(lambda: steps(config, num_blocks, name, platform, target))
    missing = [name for key, name in launched.items() if key not in listed]
    assert not missing, (model, target_name, missing)
    assert all(key in launched for key in listed), (model, target_name, "lists what nothing launches")
    return kernels, launched


for model in ("qwen3", "gpt-oss", "mamba2", "qwen3-next", "latent"):
    check(model, "gfx942")
for model in ("qwen3", "gpt-oss", "qwen3-next"):
    check(model, "gfx1100")
check("qwen3", "gfx942", kv_cache_dtype="int4")
check("latent", "gfx942", kv_cache_dtype="fp8")
check("qwen3", "sm_90")
try:
    check("latent", "gfx1100")
except ConfigError as error:
    assert "lengths are read by op latent_attention of backend torch" in str(error)
else:
    raise AssertionError

# The comparison sees what was wrong once: Triton's number of stages is another for each vendor, and hints count.
kernels, launched = check("qwen3", "gfx942")
norm = next(kernel for kernel in kernels if kernel.kernel.__name__ == "rms_norm_kernel")
for other in (replace(norm, num_stages=3), replace(norm, short=frozenset())):
    assert norm != other and not any(key in launched for key in keys_of(lambda: build([other], AMD.targets["gfx942"])))
"""


def test_keys_that_are_listed_are_those_that_are_looked_up(tmp_path: Path) -> None:
    for like in ("qwen3", "gpt-oss", "mamba2", "qwen3-next"):
        make_checkpoint(tmp_path / like, like=like)
    (tmp_path / "latent").mkdir()
    (tmp_path / "latent" / "config.json").write_text(json.dumps(LATENT))
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, path, tmp_path], env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
