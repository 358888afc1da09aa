"""Writers of quantized layers, from the layouts as their projects publish them: number by number, nothing shared with
what reads them. Each takes integers or fp8 and returns the tensors of a layer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from torch import Tensor

AWQ_PLACES = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}
"""Output within eight -> its place in the word, from the lowest bits."""


def words(columns: Tensor, bits: int) -> Tensor:
    """[N, M] numbers -> [N * bits / 32, M] int32, the first number lowest."""
    if 32 % bits:
        return dense_words(columns, bits)
    numbers, per_word = columns.numpy().astype(np.uint64), 32 // bits
    out = np.zeros((-(-len(numbers) // per_word), numbers.shape[1]), dtype=np.uint64)
    for row, values in enumerate(numbers):
        out[row // per_word] |= values << np.uint64(bits * (row % per_word))
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


def dense_words(columns: Tensor, bits: int) -> Tensor:
    """The same for numbers that go over the ends of words: 32 of them in as many words as they have bits."""
    numbers = columns.numpy().astype(object).reshape(-1, 32, columns.shape[1])
    rows = []
    for block in numbers:
        whole = [sum(int(block[i, column]) << (bits * i) for i in range(32)) for column in range(block.shape[1])]
        rows += [[(value >> (32 * word)) & 0xFFFFFFFF for value in whole] for word in range(bits)]
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


MICROSCALED = {"mxfp4": 4, "mxfp8": 8, "nvfp4": 4, "modelopt nvfp4": 4, "modelopt mxfp8": 8, "quark fp4": 4}
"""Form -> bits of an element."""
_OF_LIBRARY = {"mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized", "nvfp4": "nvfp4-pack-quantized"}


def microscaled(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A weight [O, I] packed and unpacked by the library compressed-tensors, under the names of the form."""
    bits, is_nvidia = MICROSCALED[name], name.endswith("nvfp4")
    size = 16 if is_nvidia else 32
    largest = weight.view(len(weight), -1, size).abs().amax(2)
    tensors = {"weight": weight}
    if is_nvidia:
        tensors["weight_global_scale"] = 448 * 6 / weight.abs().max().view(1)
        if name == "modelopt nvfp4":  # so that a product with the inverse is the quotient
            tensors["weight_global_scale"] = tensors["weight_global_scale"].log2().floor().exp2()
        scale = (largest / 6 * tensors["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    else:
        scale = torch.exp2(largest.log2().floor() - (2 if bits == 4 else 8))
    args = QuantizationArgs(
        num_bits=bits, type="float", strategy="tensor_group" if is_nvidia else "group", group_size=size
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    form = _OF_LIBRARY["nvfp4" if is_nvidia else "mxfp8" if bits == 8 else "mxfp4"]
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress({**tensors, "weight_scale": scale}, scheme)
    restored = compressor.decompress(stored, scheme)["weight"].float()
    if bits == 4:  # its decompress widens to bfloat16, which rounds
        elements = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)
        factor = tensors.get("weight_global_scale")
        restored = dequantize(elements, scale, args=args, global_scale=factor, dtype=torch.float32)
    if name == "modelopt nvfp4":
        stored["weight_scale_2"] = stored.pop("weight_global_scale").reciprocal()
    if name in ("modelopt nvfp4", "quark fp4"):
        stored["weight"] = stored.pop("weight_packed")
    return stored, restored


def bitsandbytes(weight: Tensor, config: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """A weight [O, I] in bitsandbytes' layout: int8 by rows, or codes of four bits in blocks of 64."""
    if config.get("load_in_8bit"):
        largest = weight.abs().amax(1)
        elements = (weight * (127 / largest)[:, None]).round().to(torch.int8)
        format_ = torch.tensor(0, dtype=torch.uint8)
        return {"weight": elements, "SCB": largest, "weight_format": format_}, elements * (largest / 127)[:, None]
    code = torch.randn(16).sort().values.clamp(-1, 1)
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    tensors = {"weight.absmax": absmax, "weight.quant_map": code}
    kind = config.get("bnb_4bit_quant_type", "fp4")
    state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    if config.get("bnb_4bit_use_double_quant"):
        offset, table = float(absmax.mean()), torch.linspace(-1, 1, 256)
        centred = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        nested = centred.abs().amax(1)
        places = ((centred / nested[:, None] + 1) * 127.5).round().long()
        absmax = (table[places] * nested[:, None]).flatten()[: len(absmax)] + offset
        tensors["weight.absmax"] = places.flatten()[: len(absmax)].to(torch.uint8)
        tensors |= {"weight.nested_absmax": nested, "weight.nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    chosen = (blocks / absmax[:, None])[..., None].sub(code).abs().argmin(-1)
    tensors["weight"] = (chosen.view(-1, 2)[:, :1] * 16 + chosen.view(-1, 2)[:, 1:]).to(torch.uint8)
    text = list(json.dumps(state).encode())
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(text, dtype=torch.uint8)
    return tensors, (code[chosen] * absmax[:, None]).view(weight.shape)


PLANES = {2: "ll", 3: "llh", 4: "llll", 5: "llllh", 6: "llllhh", 7: "llllhht", 8: "llllllll"}
"""A letter for each bit of a number, from the lowest on: the plane that it is in."""


def plane_words(columns: Tensor, bits: int) -> Tensor:
    """As `words`, each 32 numbers of a column plane by plane (GPTQModel's format gptq_p)."""
    out = []
    for block in columns.split(32):
        for plane in dict.fromkeys(PLANES[bits]):
            of_plane = [bit for bit, letter in enumerate(PLANES[bits]) if letter == plane]
            fields = sum(((block >> bit) & 1) << place for place, bit in enumerate(of_plane))
            assert isinstance(fields, Tensor)
            out.append(words(fields, len(of_plane)))
    return torch.cat(out)


def gptq(
    q: Tensor, zero: Tensor, scale: Tensor, groups: Tensor, bits: int, *, minus: int = 1, planes: bool = False
) -> dict[str, Tensor]:
    """q [O, I] and zero [O, G] from 0, scale [O, G] -> AutoGPTQ's tensors, or those of GPTQModel in planes."""
    pack = plane_words if planes else words
    return {
        "qweight": pack(q.T, bits),
        "qzeros": pack((zero - minus) & ((1 << bits) - 1), bits).T.contiguous(),
        "scales": scale.T.contiguous().half(),
        "g_idx": groups.int(),
    }


def awq(q: Tensor, zero: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """The same as AutoAWQ's gemm version."""

    def pack(rows: Tensor) -> Tensor:
        placed = torch.empty_like(rows)
        for output in range(rows.shape[1]):
            placed[:, output // 8 * 8 + AWQ_PLACES[output % 8]] = rows[:, output]
        return words(placed.T, 4).T.contiguous()

    return {"qweight": pack(q.T), "qzeros": pack(zero.T), "scales": scale.T.contiguous().half()}


def packed(q: Tensor, zero: Tensor | None, scale: Tensor, groups: Tensor | None, bits: int) -> dict[str, Tensor]:
    """The same as compressed-tensors' pack-quantized."""
    tensors = {
        "weight_packed": words(q.T, bits).T.contiguous(),
        "weight_scale": scale,
        "weight_shape": torch.tensor(q.shape),
    }
    if zero is not None:
        tensors["weight_zero_point"] = words(zero, bits)
    if groups is not None:
        tensors["weight_g_idx"] = groups.int()
    return tensors


def torchao_layer(weight: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """What torchao's Int8Tensor, Float8Tensor and IntxUnpackedToInt8Tensor are in safetensors, and the weight."""
    if kind == "float8":
        scale = weight.abs().max().view(1, 1) / 448
        elements = (weight / scale).to(torch.float8_e4m3fn)
        return {"_weight_qdata": elements, "_weight_scale": scale}, elements.float() * scale
    size = weight.shape[1] if kind == "int8" else 32
    groups = weight.view(len(weight), -1, size)
    low, high = (-128, 127) if kind == "int8" else (-8, 7)
    scale = (groups.amax(2) - groups.amin(2)) / (high - low) * 1.01
    zero = (low - groups.amin(2) / scale).round().clamp(low, high)
    zero = torch.zeros_like(zero) if kind == "int8" else zero
    scale = groups.abs().amax(2) / 127 if kind == "int8" else scale
    elements = (groups / scale[:, :, None] + zero[:, :, None]).round().clamp(low, high)
    restored = ((elements - zero[:, :, None]) * scale[:, :, None]).view(weight.shape)
    return {
        "_weight_qdata": elements.view(weight.shape).to(torch.int8),
        "_weight_scale": scale,
        "_weight_zero_point": zero.to(torch.int8),
    }, restored


def torchao_int4(weight: Tensor, size: int, *, tiles: bool) -> tuple[dict[str, Tensor], Tensor]:
    """What torchao's Int4Tensor and Int4TilePackedTo4dTensor are in safetensors, with zero points that are added."""
    outputs, inputs = weight.shape
    groups = weight.view(outputs, -1, size)
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    q = ((groups - zero[:, :, None]) / scale[:, :, None]).round().clamp(-8, 7)
    restored = (q * scale[:, :, None] + zero[:, :, None]).view(weight.shape)
    q = q.view(weight.shape).long()
    if not tiles:
        both = (q[:, ::2] & 15) | ((q[:, 1::2] & 15) << 4)
        packed = both.to(torch.uint8).view(torch.int8)
        return {"_weight_qdata": packed, "_weight_scale": scale.T, "_weight_zero_point": zero.T}, restored
    q = torch.nn.functional.pad(q + 8, (0, -inputs % 1024, 0, -outputs % 8), value=3)
    words = torch.empty(q.shape[0] // 8, q.shape[1] // 128, 32, 4, dtype=torch.int64)
    for lane in range(32):
        for word in range(4):
            first = 32 * word + lane % 4 * 2  # of each 128 inputs
            columns = [first + step for step in (0, 1, 8, 9, 16, 17, 24, 25)]
            v = q[lane // 4 :: 8].unflatten(1, (-1, 128))[:, :, columns]
            shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28])  # v0 v2 v4 v6 v1 v3 v5 v7 from the lowest bits on
            words[:, :, lane, word] = (v << shifts).sum(2)
    words = torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).int()
    side_by_side = torch.stack((scale, zero), 2)
    pads = (0, 0, 0, -inputs % 1024 // size, 0, -outputs % 8)
    padded = torch.nn.functional.pad(side_by_side, pads, value=1.0).transpose(0, 1)
    return {"_weight_qdata": words, "_weight_scale_and_zero": padded.bfloat16()}, restored
