"""A checkpoint with quantized linear layers, written from an unquantized one, in the format of compressed-tensors.

Tensor by tensor: memory holds one layer and one file of the result, whatever the model's size; with calibration, what
`quire.calibration` holds as well. Knows folders and names; the arithmetic is in `quire_quantization`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.calibration import ALGORITHMS, Calibrator
from quire.quantize_schemes import KV_CACHE_SCHEMES, NO_WEIGHTS, SCHEMES, Rounded, Scheme, quantization_config
from quire_interfaces import CheckpointError, ConfigError
from quire_models import ModelConfig, Network, build_model
from quire_models.checkpoint_files import open_checkpoint
from quire_models.mistral_format.folder import MISTRAL_FILES
from quire_models.weights import load_weights

__all__ = ["ALGORITHMS", "KV_CACHE_SCHEMES", "NO_WEIGHTS", "SCHEMES", "QuantizeReport", "quantize_checkpoint"]

MARKER = ".quire-unfinished"
"""Name of an empty file in a folder that a run writes and has not finished."""

Progress = Callable[[int, int], None]
"""(bytes quantized or copied so far, bytes of all) -> None."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport:
    """What `quantize_checkpoint` wrote."""

    num_quantized: int
    """Matrices of the checkpoint; of experts that it keeps in one tensor, each."""
    left: tuple[str, ...]
    """Names of matrices that stay as they were, embeddings aside."""
    num_kv_scales: int
    """Attentions whose keys and values have scales."""
    bytes_before: int
    bytes_after: int
    files: tuple[str, ...]


def quantize_checkpoint(
    folder: str | Path,
    out: str | Path,
    scheme: str,
    *,
    algorithm: str | None = None,
    kv_cache_scheme: str | None = None,
    calibration: Sequence[Sequence[int]] = (),
    file_bytes: int = 2 << 30,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Write a quantized copy of a checkpoint: weights, config.json, and tokenizer files as they are.

    It is written into a folder `out`.unfinished and renamed at the end. An interrupted run leaves nothing; one that was
    killed leaves that folder, which the next run knows by a marker file in it and removes. The marker goes last: killed
    behind the renaming, a run leaves a whole `out` with an empty file ".quire-unfinished" in it.

    Args:
        folder: An unquantized checkpoint in safetensors.
        out: A new or empty folder.
        scheme: A key of `SCHEMES`, or `NO_WEIGHTS`. Linear layers are rounded, those of experts too; LM head,
            embeddings, routers and norms stay.
        algorithm: One of `ALGORITHMS`. None for "gptq" where there is calibration and the scheme is of whole numbers,
            else "rtn".
        kv_cache_scheme: A key of `KV_CACHE_SCHEMES`: keys and values get scales for an fp8 e4m3 KV cache, by the
            largest that the text brings. None for no scales.
        calibration: Token ids of each sequence of a text, for algorithms other than "rtn", for scheme "fp8-static" and
            for a KV cache scheme.
        file_bytes: At most so much in a file of the result; it is held in memory.

    Raises:
        ConfigError: There is no such scheme or algorithm, they do not go together, the text is missing, `out` has
            files, or `out`.unfinished is there and not ours.
        CheckpointError: The checkpoint cannot be read, is quantized already, or none of its matrices can be.
    """
    algorithm = _algorithm(scheme, algorithm, kv_cache_scheme, calibration)
    folder, out = Path(folder), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; give another one", field="out")
    config = ModelConfig.from_path(folder)
    if config.quantization is not None:
        raise CheckpointError(f"{folder} is quantized already ({config.quantization.name}); use the unquantized model")
    if not config.is_native:
        raise CheckpointError(f"{config.architecture} runs through Transformers, where weights cannot be quantized")
    network = build_model(config)
    if kv_cache_scheme is not None and not network.attention_names:
        raise CheckpointError(
            f"{config.architecture} has no layer that keeps keys and values (what it keeps instead takes no scales); "
            "leave the scheme of the KV cache out"
        )
    form = None if scheme == NO_WEIGHTS else SCHEMES[scheme]
    with _unfinished(out) as unfinished:
        writer = _Writer(folder, unfinished, form, network, file_bytes, progress)
        if calibration:
            layers = writer.layers() if form is not None else list(network.linears)
            if not layers:
                raise CheckpointError(writer.nothing_to_quantize(scheme))
            calibrator = Calibrator(network, layers, form, algorithm)
            load_weights(network, folder)
            writer.calibrated(calibrator, calibration)
            if kv_cache_scheme is not None:
                writer.add_kv_scales(calibrator.kv_scales, kv_cache_scheme)
        return writer.finish(scheme)


@contextmanager
def _unfinished(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes it at the end: what was interrupted is not there. What a run that was killed
    has left is removed by the next one, which knows it by its marker; a folder without is somebody else's."""
    folder = out.with_name(f"{out.name}.unfinished")
    marker = folder / MARKER
    if marker.is_file() or (folder.is_dir() and not any(folder.iterdir())):
        _remove(folder)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"{folder}, in which {out.name} would be written, exists and is not what an interrupted run has left "
            f"(there is no {MARKER} in it); move it away, or give another output folder",
            field="out",
        ) from None
    marker.touch()
    try:
        yield folder
        if out.exists():
            out.rmdir()  # it is empty
        folder.rename(out)  # with the marker: without it, who is killed here would leave what nobody knows
        (out / MARKER).unlink()
    finally:
        with suppress(OSError):
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove what a run has left, its marker last: whoever is killed meanwhile leaves what the next run knows."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
    (folder / MARKER).unlink(missing_ok=True)
    folder.rmdir()


def _algorithm(
    scheme: str, algorithm: str | None, kv_cache_scheme: str | None, calibration: Sequence[Sequence[int]]
) -> str:
    if scheme not in (*SCHEMES, NO_WEIGHTS):
        names = ", ".join((*SCHEMES, NO_WEIGHTS))
        raise ConfigError(f"there is no scheme {scheme!r}; choose one of {names}", field="scheme")
    if kv_cache_scheme not in (None, *KV_CACHE_SCHEMES):
        raise ConfigError(
            f"there is no scheme {kv_cache_scheme!r} of the KV cache; choose one of {', '.join(KV_CACHE_SCHEMES)}",
            field="kv_cache_scheme",
        )
    if scheme == NO_WEIGHTS and kv_cache_scheme is None:
        raise ConfigError(
            f"{NO_WEIGHTS} leaves the weights as they are: give a scheme of the KV cache with it", field="scheme"
        )
    if algorithm not in (None, *ALGORITHMS):
        raise ConfigError(
            f"there is no algorithm {algorithm!r}; choose one of {', '.join(ALGORITHMS)}", field="algorithm"
        )
    form = SCHEMES.get(scheme)
    whole = form is not None and form.limits is not None
    algorithm = algorithm or ("gptq" if calibration and whole else "rtn")
    if algorithm != "rtn" and not whole:
        raise ConfigError(f"{algorithm} is for int8 and int4, not for {scheme}; leave it out", field="algorithm")
    needs = algorithm if algorithm != "rtn" else scheme if form is not None and form.static_inputs else ""
    needs = needs or ("a KV cache with scales" if kv_cache_scheme is not None else "")
    if needs and not any(calibration):
        raise ConfigError(f"{needs} needs a text to calibrate with; give a file (--calibration)", field="calibration")
    if calibration and not needs:
        raise ConfigError(
            f"{scheme} with {algorithm} does not look at a text; leave calibration out, or choose another algorithm",
            field="calibration",
        )
    return algorithm


class _Part(NamedTuple):
    """A layer of the network in a matrix of the checkpoint."""

    layer: str
    rows: Tensor
    """[outputs] int64: where the layer's outputs are in the matrix."""


class _Matrix(NamedTuple):
    """A matrix that is quantized; in the result it has one name."""

    name: str
    parts: tuple[_Part, ...]


class _Writer:
    """Quantizes tensors and puts them into files."""

    def __init__(
        self,
        folder: Path,
        out: Path,
        scheme: Scheme | None,
        network: Network,
        file_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._folder, self._out, self._scheme, self._network = folder, out, scheme, network
        self._linears = {layer.name.removesuffix(".weight"): layer for layer in network.linears}
        self._checkpoint = open_checkpoint(folder)
        self._files = _Files(out, file_bytes)
        self._progress = progress
        self._bytes = self._quantized = 0
        self._written: set[str] = set()
        """Names of tensors of the checkpoint."""
        self._folds: dict[str, Tensor] = {}
        self._kv_cache_scheme: str | None = None
        self._kv_scales = 0

    def layers(self) -> list[Any]:
        """Layers of the network that are quantized."""
        names = [part.layer for name, tensor in self._checkpoint.tensors() for matrix in self._matrices(name, tensor)
                 for part in matrix.parts]  # fmt: skip
        return [self._linears[name] for name in names]

    def calibrated(self, calibrator: Calibrator, sequences: Sequence[Sequence[int]]) -> None:
        """Write what `calibrator` makes of the layers, one decoder layer after the other."""
        stored: dict[str, list[tuple[str, Tensor]]] = {}
        for name, tensor in self._checkpoint.tensors():
            for place in {calibrator.place(part.layer) for m in self._matrices(name, tensor) for part in m.parts}:
                stored.setdefault(place, []).append((name, tensor))

        def write(place: str) -> None:
            for name, tensor in stored[place]:
                self._add(name, tensor, self._matrices(name, tensor), calibrator.take)

        calibrator.run(sequences, write)
        self._folds = dict(calibrator.folds)

    def add_kv_scales(self, scales: Mapping[str, Tensor], kv_cache_scheme: str) -> None:
        """Write scales of keys and values under the names of compressed-tensors.

        Args:
            scales: Name of an attention -> [2, Hkv] float32.
        """
        assert tuple(scales) == self._network.attention_names
        per_head = KV_CACHE_SCHEMES[kv_cache_scheme] == "attn_head"
        stored = self._stored_names(scales)
        for name, both in scales.items():
            parts = both[:, :, None, None] if per_head else both.amax(dim=1, keepdim=True)
            for kind, scale in zip(("k_scale", "v_scale"), parts, strict=True):
                self._files.add({f"{stored[name]}{kind}": scale.clone()})
        self._kv_cache_scheme, self._kv_scales = kv_cache_scheme, len(scales)

    def _stored_names(self, attentions: Collection[str]) -> dict[str, str]:
        """Name of an attention, with the dot behind it -> the same in the checkpoint, which may have other names."""
        stored = {name: name for name in attentions}
        for name, tensor in self._checkpoint.tensors():
            for part, _ in self._network.checkpoint_tensors(name, tensor):
                own = next((one for one in attentions if part.startswith(one)), None)
                if own is not None and name.endswith(part.removeprefix(own)):
                    stored[own] = name.removesuffix(part.removeprefix(own))
        for own, name in stored.items():
            if [part for part, _ in self._network.checkpoint_tensors(f"{name}k_scale", torch.ones(1))] != [
                f"{own}k_scale"
            ]:
                raise CheckpointError(
                    f"the checkpoint has no name of its own for {own.rstrip('.')}, behind which scales of keys and "
                    "values would stand; leave the scheme of the KV cache out"
                )
        return stored

    def finish(self, scheme: str) -> QuantizeReport:
        """Write everything else."""
        left = []
        for name, tensor in self._checkpoint.tensors():
            if name in self._written:
                continue
            matrices = self._matrices(name, tensor)
            if matrices:
                self._add(name, tensor, matrices, None)
                continue
            factors = self._folds.pop(name, None)
            copy = tensor.clone() if factors is None else (tensor.float() / factors).to(tensor.dtype)
            self._add_tensors({name: copy}, name, tensor)
            if tensor.ndim > 1 and name.endswith(".weight") and "embed" not in name:
                left.append(name.removesuffix(".weight"))
        if self._scheme is not None and not self._quantized:
            raise CheckpointError(self.nothing_to_quantize(scheme))
        if self._folds:
            raise CheckpointError(
                f"the checkpoint keeps {', '.join(self._folds)} within other tensors, where awq cannot change them; "
                "use gptq"
            )
        files = self._files.finish()
        ignored = sorted({*left, "lm_head"})
        config = quantization_config(self._scheme, ignored, kv_cache_scheme=self._kv_cache_scheme)
        _copy_others(self._folder, self._out, config)
        return QuantizeReport(
            num_quantized=self._quantized, left=tuple(left), num_kv_scales=self._kv_scales, bytes_before=self._bytes,
            bytes_after=self._files.total_bytes, files=files,
        )  # fmt: skip

    def nothing_to_quantize(self, scheme: str) -> str:
        """Why none of the matrices is quantized, and what to do."""
        architecture = self._network.config.architecture
        start = f"there is nothing to quantize as {scheme}: none of the matrices of {architecture}"
        layer_widths = [layer.shape[1] for layer in self._linears.values()]
        if not layer_widths or self._scheme is None:
            return f"{start} is in a linear layer whose weights can be"
        if not any(self._scheme.fits(inputs) for inputs in layer_widths):
            group, widths = self._scheme.weights["group_size"], sorted(set(layer_widths))
            fitting = [name for name, each in SCHEMES.items() if any(map(each.fits, widths))]
            return (
                f"{start} has inputs in whole groups of {group} (they have {', '.join(map(str, widths[:5]))}); "
                f"take one of {', '.join(fitting)}"
            )
        return f"{start} is stored as the network has it (docs/quantization.md)"

    def _matrices(self, name: str, tensor: Tensor) -> tuple[_Matrix, ...]:
        """What is quantized in a tensor of the checkpoint: a layer, several side by side, or many experts; nothing
        where a part of it cannot be."""
        pack = self._network.packs.get(name)
        if pack is not None and tuple(tensor.shape) == pack.shape:
            parts = list(pack.split(tensor))
            if not all(part.ndim == 2 and self._fits(part_name, part) for part_name, part in parts):
                return ()
            names = [part_name.removesuffix(".weight") for part_name, _ in parts]
            rows = [torch.arange(len(part)) for _, part in parts]
            return tuple(_Matrix(n, (_Part(n, r),)) for n, r in zip(names, rows, strict=True))
        if tensor.ndim != 2 or not name.endswith(".weight"):
            return ()
        # What becomes of numbered rows says what becomes of the tensor's.
        numbers = torch.arange(len(tensor))[:, None].expand(-1, 2).contiguous()
        tensors = list(self._network.checkpoint_tensors(name, numbers))
        whole = all(
            part.ndim == 2 and part.shape[1] == 2 and torch.equal(part[:, 0], part[:, 1]) for _, part in tensors
        )
        if not whole or not torch.equal(torch.cat([part[:, 0] for _, part in tensors]).sort().values, numbers[:, 0]):
            return ()
        if not all(self._fits(part_name, tensor[: len(part)]) for part_name, part in tensors):
            return ()
        parts_of = tuple(_Part(part_name.removesuffix(".weight"), part[:, 0]) for part_name, part in tensors)
        return (_Matrix(name.removesuffix(".weight"), parts_of),)

    def _fits(self, name: str, weight: Tensor) -> bool:
        layer = self._linears.get(name.removesuffix(".weight"))
        return (
            layer is not None
            and name.endswith(".weight")
            and layer.shape == tuple(weight.shape)
            and self._scheme is not None
            and self._scheme.fits(weight.shape[1])
        )

    def _add(
        self,
        name: str,
        tensor: Tensor,
        matrices: tuple[_Matrix, ...],
        take: Callable[[str], tuple[Rounded, Tensor | None]] | None,
    ) -> None:
        """Quantize a tensor, or take what was made of its layers."""
        assert self._scheme is not None
        pack = self._network.packs.get(name)
        weights = [tensor] if pack is None else [part for _, part in pack.split(tensor)]
        for matrix, weight in zip(matrices, weights, strict=True):
            if take is None:
                parts = self._scheme.tensors(self._scheme.round(weight), tensor.dtype)
            else:
                parts = self._put_together(matrix, take, len(weight), tensor.dtype)
            self._add_tensors({f"{matrix.name}.{kind}": part for kind, part in parts.items()}, name, None)
        self._quantized += len(matrices)
        self._add_tensors({}, name, tensor)

    def _put_together(
        self, matrix: _Matrix, take: Callable[[str], tuple[Rounded, Tensor | None]], outputs: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        assert self._scheme is not None
        pieces = [take(part.layer) for part in matrix.parts]
        places = torch.argsort(torch.cat([part.rows for part in matrix.parts]))
        elements = torch.cat([rounded.elements.view(torch.int8) for rounded, _ in pieces])[places]
        scale = torch.cat([rounded.scale.float() for rounded, _ in pieces])[places]
        parts = self._scheme.tensors(Rounded(elements.view(pieces[0][0].elements.dtype), scale), dtype)
        input_scales = [one for _, one in pieces if one is not None]
        return {**parts, "input_scale": max(input_scales, key=float).to(dtype)} if input_scales else parts

    def _add_tensors(self, tensors: dict[str, Tensor], name: str, done: Tensor | None) -> None:
        """done: the tensor of the checkpoint that nothing is left to do for."""
        self._files.add(tensors)
        if done is None:
            return
        self._written.add(name)
        self._bytes += done.nbytes
        if self._progress is not None:
            self._progress(self._bytes, self._checkpoint.total_bytes)


class _Files:
    """Tensors into files of bounded size, and their index."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder, self._limit = folder, file_bytes
        self._held: dict[str, Tensor] = {}
        self._names: list[list[str]] = []
        self.total_bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in self._held.values())
        if self._held and size + sum(tensor.nbytes for tensor in tensors.values()) > self._limit:
            self._write()
        self._held |= tensors
        self.total_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def _write(self) -> None:
        save_file(self._held, self._folder / f"part-{len(self._names)}", metadata={"format": "pt"})
        self._names.append(list(self._held))
        self._held = {}

    def finish(self) -> tuple[str, ...]:
        """Give the files their names. Returns them."""
        self._write()
        count = len(self._names)
        finals = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        finals = ["model.safetensors"] if count == 1 else finals
        for i, final in enumerate(finals):
            (self._folder / f"part-{i}").rename(self._folder / final)
        if count > 1:
            weight_map = {name: final for final, names in zip(finals, self._names, strict=True) for name in names}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
        return tuple(finals)


def _copy_others(folder: Path, out: Path, quantization: dict[str, Any]) -> None:
    """Tokenizer and settings as they are, and config.json with what was done."""
    for path in folder.iterdir():
        weights = path.suffix in (".safetensors", ".bin", ".gguf", ".pt") or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name not in MISTRAL_FILES:
            shutil.copyfile(path, out / path.name)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values["quantization_config"] = quantization
    (out / "config.json").write_text(json.dumps(values, indent=2), encoding="utf-8")
