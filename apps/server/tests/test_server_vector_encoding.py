"""Vectors in every form that clients ask for: as torch converts them, and as sentence-transformers quantizes them."""

from __future__ import annotations

import base64
import math
import random
import struct
import sys

import pytest
import torch

from quire_server.vector_encoding import (
    EMBED_DTYPES,
    EmbedDType,
    base64_vector,
    binary_vector,
    dot_product,
    encoded_vector,
    float_matrix,
    float_vector,
    int8_vector,
)

TORCH: dict[EmbedDType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-30, 65504.0, 65520.0, -7e4, 448.0, 464.0, 465.0, 1e30, 57344.0, 61440.0]
SPECIAL += [61441.0, math.inf, -math.inf, 2**-9, 2**-10, 3 * 2**-11, 2**-16, 2**-17, 2**-24, 2**-25, 1 + 2**-8]


def buffer(numbers: list[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def as_torch(numbers: list[float], dtype: EmbedDType) -> bytes:
    values = torch.tensor(numbers, dtype=torch.float32).to(TORCH[dtype])
    return bytes(values.view(torch.uint8).numpy().tobytes())


@pytest.fixture(scope="module")
def numbers() -> list[float]:
    draw = random.Random(5)
    scales = (1e-4, 0.02, 0.1, 1.0, 30.0, 3e4)
    return SPECIAL + [draw.gauss(0, scale) for scale in scales for _ in range(500)]


@pytest.mark.parametrize("dtype", EMBED_DTYPES)
def test_every_type_is_rounded_as_torch_does(numbers: list[float], dtype: EmbedDType) -> None:
    data = encoded_vector(buffer(numbers), dtype, "little")
    assert len(data) == len(numbers) * EMBED_DTYPES[dtype]
    assert data == as_torch(numbers, dtype)


@pytest.mark.parametrize("dtype", EMBED_DTYPES)
def test_nan_stays_nan(dtype: EmbedDType) -> None:
    data = bytearray(encoded_vector(buffer([math.nan, 1.0]), dtype, "little"))
    values = torch.frombuffer(data, dtype=TORCH[dtype]).float()
    assert values.isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", EMBED_DTYPES)
def test_big_endian_turns_the_bytes_of_each_number_around(numbers: list[float], dtype: EmbedDType) -> None:
    little = encoded_vector(buffer(numbers), dtype, "little")
    big = encoded_vector(buffer(numbers), dtype, "big")
    size = EMBED_DTYPES[dtype]
    assert big == b"".join(little[start : start + size][::-1] for start in range(0, len(little), size))
    assert encoded_vector(buffer(numbers), dtype, "native") == (little if sys.byteorder == "little" else big)


def test_floats_and_base64_are_the_buffer(numbers: list[float]) -> None:
    data = buffer(numbers)
    assert buffer(float_vector(data)) == data
    assert base64.b64decode(base64_vector(data, endianness="little")) == data
    assert float_matrix(buffer([1, 2, 3, 4, 5, 6]), 3) == [[1, 2, 3], [4, 5, 6]]
    assert float_matrix(b"", 0) == []


def test_bits_are_packed_from_the_highest_on() -> None:
    numbers = [0.1, -0.1, 0.0, 0.2, 1.0, -3.0, 0.5, -0.0] + [1.0] * 8 + [-1.0] * 8
    assert binary_vector(buffer(numbers), signed=False) == [0b10111011, 255, 0]
    assert binary_vector(buffer(numbers), signed=True) == [0b10111011 - 128, 127, -128]
    assert binary_vector(b"", signed=False) == []
    with pytest.raises(ValueError, match="7 numbers"):
        binary_vector(buffer([1.0] * 7), signed=True)


def test_int8_keeps_the_direction() -> None:
    draw = random.Random(1)
    numbers = [draw.gauss(0, 0.05) for _ in range(384)]
    signed = int8_vector(buffer(numbers), signed=True)
    assert max(map(abs, signed)) == 127
    cosine = torch.cosine_similarity(torch.tensor(numbers), torch.tensor(signed, dtype=torch.float32), dim=0)
    assert cosine > 0.9999
    assert int8_vector(buffer(numbers), signed=False) == [number + 128 for number in signed]
    assert int8_vector(buffer([0.0, 0.0]), signed=True) == [0, 0]


def test_dot_product() -> None:
    assert dot_product(buffer([1, 2, 3]), buffer([4, 5, 6])) == 32
