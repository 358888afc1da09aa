"""The instructions that tests emulate are those of the manual, and those of the processor where it has them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kernels_cpu_emulation import EMULATED, RECIPE, TESTS, emulating_flags
from kernels_cpu_instructions import DEFINITIONS, INDEXES, Bytes, tile_product
from kernels_cpu_steps import same_for_each_build

from quire_kernels_cpu.processor import supported_builds

SOURCE = TESTS / "emulated" / "instructions.cpp"
KINDS = ("bf16", "signed", "mixed")

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif("avx2" not in supported_builds(), reason="needs a processor with AVX2"),
    same_for_each_build,
]


class Operands(ctypes.Structure):
    _fields_ = (("numbers", ctypes.c_uint8 * 192), ("mask", ctypes.c_uint32))


class Matrix(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


def compiled(flags: list[str], folder: Path) -> ctypes.CDLL:
    library = folder / "instructions.so"
    command = ["g++", *flags, "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(emulating_flags("amx"), tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    has = [build for build in ("amx", "avx512bf16", "avx512vnni", "avx512") if build in supported_builds()]
    if not has:
        pytest.skip("this processor has no AVX-512")
    # GCC 12 warns of what its own header leaves undefined.
    flags = [*RECIPE["FLAGS"], *RECIPE["BUILDS"][has[0]], "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    return compiled(flags, tmp_path_factory.mktemp("native"))


@pytest.fixture(params=["emulated", "native"])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return request.getfixturevalue(request.param)


def aligned(count: int) -> Bytes:
    """`count` bytes from a multiple of 64 on, all of them 0xa5."""
    room = np.full(count + 64, 0xA5, np.uint8)
    begin = -room.ctypes.data % 64
    return room[begin : begin + count]


SPECIAL = np.array(
    [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3EFFFFFF, 0x3F000000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001],
    np.uint32,
)  # zero, denormal numbers, the smallest normal one, 1, around 1/2, the largest, infinity, NaNs


def operand(generator: np.random.Generator, case: int) -> Bytes:
    """64 bytes: of chance, numbers of a middling size, or in part what is special as float32, bfloat16 or bytes."""
    if case % 4 == 0:
        return generator.integers(0, 256, 64, dtype=np.uint8)
    numbers = generator.normal(size=16) * 2.0 ** generator.integers(-12, 12, 16)
    words = numbers.astype(np.float32).view(np.uint32)
    if case % 4 == 1:
        return words.view(np.uint8)
    chosen = generator.choice(SPECIAL, 16) | generator.integers(0, 2, 16, dtype=np.uint32) << 31
    if case % 4 == 2:
        return np.where(generator.random(16) < 0.5, chosen, words).view(np.uint8)
    pairs = chosen >> 16 | generator.permutation(chosen) & 0xFFFF0000
    extremes = generator.choice(np.array([0x7F, 0x80, 0xFF, 0], np.uint8), 64).view(np.uint32)
    return np.where(generator.random(16) < 0.5, pairs, extremes).view(np.uint8)


def same(got: Bytes, expected: np.ndarray) -> bool:
    """To the bit; of floats that are no number only that both are none."""
    numbers = got.view(expected.dtype)
    equal = got.reshape(len(expected), -1) == expected.view(np.uint8).reshape(len(expected), -1)
    if expected.dtype.kind == "f":
        return bool((equal.all(axis=1) | (np.isnan(numbers) & np.isnan(expected))).all())
    return bool(equal.all())


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities and what is no number
def test_an_instruction_gives_what_the_manual_says(library: ctypes.CDLL, name: str) -> None:
    if not hasattr(library, name):
        pytest.skip("this processor has AVX-512 and not this instruction")
    generator, operands = np.random.default_rng(3), aligned(ctypes.sizeof(Operands))
    of = Operands.from_buffer(operands)
    signed = np.concatenate([SPECIAL, SPECIAL | np.uint32(1 << 31)])
    pairs = np.resize(np.stack(np.meshgrid(signed, signed), axis=-1), (31, 16, 2))  # each with each, 16 at a time
    for case in range(256 + len(pairs)):
        a, b, c = (operand(generator, case // 4**place) for place in range(3))
        if case % 3 == 0:
            b = np.where(generator.random(16) < 0.3, a.view(np.uint32), b.view(np.uint32)).view(np.uint8)
        if case >= 256:
            a, b = (np.ascontiguousarray(x).view(np.uint8) for x in pairs[case - 256].T)
        if name in INDEXES:
            c = generator.integers(0, 256, 64, dtype=np.uint8)
        operands[:192] = np.concatenate([a, b, c])
        of.mask = int(generator.integers(0, 1 << 32)) if case else 0xFFFFFFFF
        expected, to = DEFINITIONS[name](a, b, c, of.mask), aligned(128)
        getattr(library, name)(ctypes.byref(of), to.ctypes.data_as(ctypes.c_void_p))
        size = expected.nbytes
        assert same(to[:size].copy(), expected), (case, to[:size].view(expected.dtype), expected)
        assert (to[size:] == 0xA5).all()


def configuration(rows: int, words: int, columns: int) -> Bytes:
    config = np.zeros(64, np.uint8)
    config[0] = 1
    for tile, (tile_rows, tile_words) in enumerate(((rows, columns), (rows, words), (words, columns))):
        config[16 + 2 * tile], config[48 + tile] = 4 * tile_words, tile_rows
    return config


@pytest.mark.parametrize("shape", [(16, 16, 16), (1, 16, 16), (16, 3, 16), (5, 16, 7), (3, 2, 1)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_product_of_tiles_is_the_manuals(library: ctypes.CDLL, kind: str, shape: tuple[int, int, int]) -> None:
    if not hasattr(library, "request_tiles") or not library.request_tiles():
        pytest.skip("this processor has no tiles, or the system gives none")
    rows, words, columns = shape
    generator, config = np.random.default_rng(rows + words), configuration(rows, words, columns)
    for case in range(24):
        room = [
            np.concatenate([operand(generator, case) for _ in range(height * 2)]).reshape(height, 128)
            for height in (rows, rows, words)
        ]
        total, a, b = (
            each[:, : 4 * width].reshape(len(each), width, 4)
            for each, width in zip(room, (columns, words, columns), strict=True)
        )
        from_zero = case % 2
        expected = tile_product(kind, total * (1 - from_zero), a, b)
        beside = room[0][:, 4 * columns :].copy()
        matrices = [Matrix(each.ctypes.data, 128) for each in room]
        library.tile_product(
            config.ctypes.data_as(ctypes.c_void_p), KINDS.index(kind), from_zero, *map(ctypes.byref, matrices)
        )
        for got, row in zip(room[0], expected, strict=True):
            assert same(got[: 4 * columns].copy(), row), (case, got[: 4 * columns].view(row.dtype), row)
        assert np.array_equal(room[0][:, 4 * columns :], beside)


FAULTS = {
    "an aligned access": "lib.load_ps(uneven, room)",
    "none was configured": "lib.use_no_tile()",
    "stands twice": "lib.multiply_a_tile_by_itself(config(16, 16, 16))",
    "shapes do not fit": "lib.tile_product(config(16, 16, 16, 3), 0, 1, matrix, matrix, matrix)",
    "a shape that no tile has": "lib.tile_product(config(17, 16, 16), 0, 1, matrix, matrix, matrix)",
    "without rows": "lib.tile_product(config(0, 0, 0), 0, 1, matrix, matrix, matrix)",
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_would_be_a_fault_ends_the_process(emulated: ctypes.CDLL, what: str) -> None:
    code = f"""
import ctypes
lib = ctypes.CDLL({emulated._name!r})
room = ctypes.create_string_buffer(4096)
matrix = (ctypes.c_int64 * 2)(ctypes.addressof(room), 64)
def config(rows, words, columns, b_rows=None):
    made = (ctypes.c_uint8 * 64)(1)
    shapes = (rows, columns), (rows, words), (words if b_rows is None else b_rows, columns)
    for tile, (tile_rows, tile_words) in enumerate(shapes):
        made[16 + 2 * tile], made[48 + tile] = 4 * tile_words, tile_rows
    return made
uneven = ctypes.c_void_p(ctypes.addressof(room) // 64 * 64 + 68)
{FAULTS[what]}
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode < 0
    assert what in run.stderr


def test_each_build_but_the_lowest_is_emulated() -> None:
    assert EMULATED.keys() == RECIPE["BUILDS"].keys() - {"avx2"}
