"""Vectors as clients ask for them: numbers, base64, raw bytes of several types, and quantized integers.

The engine gives float32, little-endian (`PooledOutput.data`). Everything here is of the standard library: the process
that answers HTTP imports neither torch nor numpy.
"""

from __future__ import annotations

import base64
import functools
import math
import struct
import sys
from array import array
from bisect import bisect_left
from typing import Literal

__all__ = [
    "EMBED_DTYPES",
    "EmbedDType",
    "EncodingFormat",
    "Endianness",
    "base64_vector",
    "binary_vector",
    "dot_product",
    "encoded_vector",
    "float_matrix",
    "float_vector",
    "int8_vector",
]

Buffer = bytes | memoryview
"""Where the numbers of a vector lie."""
EmbedDType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
"""Types of the numbers in base64 and raw bytes."""
Endianness = Literal["native", "big", "little"]
"""Order of the bytes of one number; "native" is that of the server's machine."""
EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
"""How vectors are sent: numbers in JSON, base64 in JSON, or raw bytes with or without a header that describes them."""

EMBED_DTYPES: dict[EmbedDType, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Type -> bytes of one number."""


def _floats(data: Buffer) -> array[float]:
    numbers = array("f")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def float_vector(data: Buffer) -> list[float]:
    """The numbers of a float32 buffer (little-endian, any shape, flat)."""
    return _floats(data).tolist()


def float_matrix(data: Buffer, width: int) -> list[list[float]]:
    """The rows of a float32 buffer of shape [rows, width] (little-endian)."""
    numbers = _floats(data).tolist()
    return [numbers[start : start + width] for start in range(0, len(numbers), width)] if width else []


def encoded_vector(data: Buffer, dtype: EmbedDType = "float32", endianness: Endianness = "native") -> bytes:
    """A float32 buffer as bytes of another type, each number rounded to the nearest, ties to even.

    Numbers out of range become infinite, and 448 or -448 in fp8_e4m3, which has no infinity: as torch converts them.

    Args:
        data: float32, little-endian.
        dtype: Of the result.
        endianness: Byte order of the result.
    """
    order = sys.byteorder if endianness == "native" else endianness
    if dtype == "float32":
        return bytes(data) if order == "little" else _swapped(data, "I")
    if dtype == "float16":
        numbers = _floats(data)
        sign = "<" if order == "little" else ">"
        try:
            return struct.pack(f"{sign}{len(numbers)}e", *numbers)
        except OverflowError:
            return b"".join(_float16(number, sign) for number in numbers)
    if dtype == "bfloat16":
        halves = array("H", map(_bfloat16_bits, _bits(data)))
        if sys.byteorder != order:
            halves.byteswap()
        return halves.tobytes()
    values = _fp8_values(3, 7, 0x7F) if dtype == "fp8_e4m3" else _fp8_values(2, 15, 0x7D)
    return bytes(_fp8_code(number, values) for number in _floats(data))


def _bits(data: Buffer) -> array[int]:
    words = array("I")
    words.frombytes(data)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _swapped(data: Buffer, code: str) -> bytes:
    words = array(code)
    words.frombytes(data)
    words.byteswap()
    return words.tobytes()


def _float16(number: float, sign: str) -> bytes:
    try:
        return struct.pack(f"{sign}e", number)
    except OverflowError:
        return struct.pack(f"{sign}e", math.copysign(math.inf, number))


def _bfloat16_bits(bits: int) -> int:
    """The upper half of a float32's bits, rounded to the nearest, ties to even."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return (bits >> 16) | 0x40  # a NaN stays one
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@functools.cache
def _fp8_values(mantissa_bits: int, bias: int, num_codes: int) -> tuple[float, ...]:
    """The positive values of a format of 8 bits by their codes (FP8 Formats for Deep Learning, arXiv:2209.05433,
    section 3). Infinity, where there is one, has the value that would come next."""
    values = []
    for code in range(num_codes):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits)
        values.append(math.ldexp(fraction + (exponent > 0), max(exponent, 1) - bias))
    return tuple(values)


def _fp8_code(number: float, values: tuple[float, ...]) -> int:
    sign = 0x80 if math.copysign(1.0, number) < 0 else 0
    if math.isnan(number):
        return sign | 0x7F
    size = abs(number)
    above = bisect_left(values, size)
    if above >= len(values):
        return sign | (len(values) - 1)
    if above == 0:
        return sign
    below = above - 1
    to_below, to_above = size - values[below], values[above] - size
    takes_below = to_below < to_above or (to_below == to_above and below % 2 == 0)
    return sign | (below if takes_below else above)


def base64_vector(data: Buffer, dtype: EmbedDType = "float32", endianness: Endianness = "native") -> str:
    """`encoded_vector` in base64, as OpenAI's clients ask for float32."""
    return base64.b64encode(encoded_vector(data, dtype, endianness)).decode("ascii")


def binary_vector(data: Buffer, *, signed: bool) -> list[int]:
    """One bit per number, 0 where it is below 0, eight to an integer, the first in its highest bit.

    Args:
        data: float32, little-endian; a multiple of 8 numbers.
        signed: Whether the integers are from -128 to 127 (each 128 less than unsigned) instead of 0 to 255.

    Raises:
        ValueError: the number of numbers is no multiple of 8.
    """
    numbers = _floats(data)
    if len(numbers) % 8:
        raise ValueError(f"vectors of {len(numbers)} numbers cannot be packed into bits, eight to an integer")
    bits = "".join("1" if number >= 0 else "0" for number in numbers)
    offset = 128 if signed else 0
    return [packed - offset for packed in int(bits or "0", 2).to_bytes(len(numbers) // 8, "big")]


def int8_vector(data: Buffer, *, signed: bool) -> list[int]:
    """Numbers as integers, the one farthest from 0 as 127 or -127: the direction of a vector is kept, its length is
    not.

    Args:
        data: float32, little-endian, finite.
        signed: Whether the integers are from -127 to 127 instead of 1 to 255 (each 128 more).
    """
    numbers = _floats(data)
    largest = max(map(abs, numbers), default=0.0)
    scale = 127 / largest if largest else 0.0
    offset = 0 if signed else 128
    return [round(number * scale) + offset for number in numbers]


def dot_product(first: Buffer, second: Buffer) -> float:
    """The sum of products of two float32 buffers of one length (little-endian), in float64."""
    return math.fsum(map(float.__mul__, _floats(first), _floats(second)))
