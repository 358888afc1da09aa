"""From the arguments of `quire bench peers` to what will be measured, with everything checked before the first run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.assemble import model_folder
from quire.config import QuireConfig
from quire.plan import resolved_dtype
from quire_bench.comparison import AnySituation
from quire_bench.embed_situations import parse_embed_situations
from quire_bench.limits import ModelWork, file_bytes
from quire_bench.peer_process import engine_settings
from quire_bench.peers import OURS, Engine, PeerOptions, find_engine, find_peers, has_module
from quire_bench.situations import Lengths, parse_situations
from quire_bench.speech_files import SPEECH_FORMATS, write_speech_files
from quire_bench.speech_situations import parse_speech_situations
from quire_bench.spoken import Speech
from quire_bench.stream_situations import parse_stream_situations
from quire_bench.vision_situations import parse_image_size, parse_vision_situations
from quire_bench.workload import parse_token_range
from quire_interfaces import CheckpointError, ConfigError
from quire_models.config import ModelConfig

__all__ = ["ComparisonPlan", "set_up"]

PREFILL_LEN = 2048
WEIGHT_FORMATS = ("int8", "int4")
"""Forms of weights that are measured beside llama.cpp's."""
SPEECH_WEIGHT_FORMATS = ("int8", "w8a8")
"""Those that are measured beside faster-whisper's int8, which rounds inputs as `w8a8` does."""
SITUATIONS = {
    "text": "first-token,decode,concurrent-8,concurrent-32,prefill,memory",
    "vision": "first-token,image,image-64,memory",
    "serve": "first-token,clients-16,clients-64,memory",
    "embed": "first-token,embed-16,embed-128,embed-512,embed-mixed,latency-16,latency-128,latency-512,memory",
    "speech": "first-token,file-60,files-8,memory",
}
"""Task -> the situations that are measured where none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """What will be measured, on what, with whom."""

    model: str
    architecture: str
    dtype: str
    engines: list[Engine]
    missing: dict[str, str]
    """Peer -> why it is not measured."""
    situations: list[AnySituation]
    settings: dict[str, Any]
    work: dict[str, ModelWork]
    """Engine -> what its weights make it read and compute."""
    arguments: dict[str, Any]

    @property
    def num_steps(self) -> int:
        """Measurements of a round."""
        sent = sum(situation.sends_requests for situation in self.situations)
        return 1 + len(self.engines) * (1 + sent)


def set_up(
    args: argparse.Namespace, options: PeerOptions, scratch: Path, on_progress: Callable[[str], object]
) -> ComparisonPlan:
    """Check the arguments, find model and peers, and convert the checkpoint for those that read another format.

    Args:
        args: Of the command.
        options: Where peers are.
        scratch: Folder for converted checkpoints, which must stay as long as the plan.
        on_progress: Told what is converted.

    Raises:
        ConfigError: something that cannot work, e.g. lengths beyond the model's context, or a peer that is not here.
        CheckpointError: a model that is missing or not understood.
    """
    if args.timeout <= 0:
        raise ConfigError(f"timeout must be above 0, got {args.timeout}", field="timeout")
    folder = model_folder(QuireConfig.of(model=args.model))
    model = ModelConfig.from_path(folder)
    dtype = resolved_dtype(args.dtype, model.dtype)
    prefill_len = (
        args.prefill_len if args.prefill_len is not None else min(PREFILL_LEN, max(model.max_model_len - 1, 1))
    )
    lengths = Lengths(
        input_len=args.input_len,
        output_len=args.output_len,
        prefill_len=prefill_len,
        token_range=parse_token_range(args.token_range),
    )
    situations = _situations(args, lengths, model.max_model_len, scratch)
    names = None if args.peers is None else [name for name in args.peers.split(",") if name]
    formats = _weight_formats(args)
    wants_file = args.task == "text" and "--gguf" not in options.files and (names is None or "llama.cpp" in names)
    if wants_file and has_module("llama.cpp", options):
        file = _converted(folder, scratch, "plain", dtype, on_progress)
        if file is not None:
            options = replace(options, files={**options.files, "--gguf": str(file)})
    peers, missing = find_peers(names, options, args.task)
    ours = find_engine(OURS, options, args.task)
    assert isinstance(ours, Engine)
    engines = [ours, *peers]
    if args.task == "speech":
        engines = _with_speech_files(engines, folder, scratch, on_progress)
    for weights in formats:
        own = f"{OURS} {weights}"
        engines.append(replace(ours, name=own, beside=own, quantization=weights))
        for engine in tuple(engines):
            if engine.name == "faster-whisper":
                engines.append(replace(engine, name=f"{engine.name} {weights}", quantization=weights, beside=own))
            if engine.name == "llama.cpp":
                file = _converted(folder, scratch, weights, dtype, on_progress)
                if file is not None:
                    engines.append(replace(engine, name=f"{engine.name} {weights}", file=str(file), beside=own))
    settings = _settings(args, folder, dtype, situations)
    if settings["max_model_len"] > model.max_model_len:
        raise ConfigError(
            f"the longest sequence is {settings['max_model_len']} tokens, but the model's context is "
            f"{model.max_model_len}; lower --prefill-len, --input-len or --output-len",
            field="prefill_len",
        )
    plain = ModelWork.of(model, dtype)
    work = {}
    for engine in engines:
        if engine.is_ours:
            work[engine.name] = ModelWork.of(model, dtype, engine.quantization or args.quantization)
        else:
            work[engine.name] = plain if engine.file is None else replace(plain, weight_bytes=file_bytes(engine.file))
    return ComparisonPlan(
        model=args.model or "the demo model",
        architecture=model.architecture,
        dtype=dtype,
        engines=engines,
        missing=missing,
        situations=situations,
        settings=settings,
        work=work,
        arguments={name: value for name, value in vars(args).items() if name not in ("run", "command", "kind")},
    )


def _weight_formats(args: argparse.Namespace) -> list[str]:
    named = list(dict.fromkeys(name for name in args.weight_formats.split(",") if name))
    if named and args.task not in ("text", "speech"):
        raise ConfigError("weight_formats are measured by --task text and speech only", field="weight_formats")
    formats = SPEECH_WEIGHT_FORMATS if args.task == "speech" else WEIGHT_FORMATS
    for name in named:
        if name not in formats:
            known = ", ".join(formats)
            raise ConfigError(f"weight_formats must be among {known}, got {name!r}", field="weight_formats")
    return named


def _converted(
    folder: Path, scratch: Path, weights: str, dtype: str, on_progress: Callable[[str], object]
) -> Path | None:
    """The checkpoint as a GGUF file; None where none can be written, which is said."""
    path = scratch / f"{weights}.gguf"
    try:
        from quire_bench.gguf_file import write_gguf

        on_progress(f"writing {path.name} for llama.cpp")
        write_gguf(folder, path, weights, dtype)
    except (ImportError, CheckpointError) as error:
        on_progress(f"llama.cpp gets no file: {error}")
        return None
    return path


def _with_speech_files(
    engines: list[Engine], folder: Path, scratch: Path, on_progress: Callable[[str], object]
) -> list[Engine]:
    """The engines, those that read other formats with files in these. Raises CheckpointError: no Whisper."""
    on_progress("writing the checkpoint for the peers")
    write_speech_files(folder, scratch)
    paths = {name: str(scratch / path) for name, path in SPEECH_FORMATS.items()}
    return [replace(engine, file=paths.get(engine.name, engine.file)) for engine in engines]


def _situations(args: argparse.Namespace, lengths: Lengths, max_model_len: int, scratch: Path) -> list[AnySituation]:
    named = SITUATIONS[args.task] if args.situations is None else args.situations
    if args.task == "speech":
        output_len = min(lengths.output_len, max_model_len // 2)
        return [*parse_speech_situations(named, Speech(scratch, args.recordings), output_len)]
    if args.task == "embed":
        return [*parse_embed_situations(named, lengths, max_model_len)]
    if args.task == "serve":
        return [*parse_stream_situations(named, lengths)]
    if args.task == "vision":
        return [*parse_vision_situations(named, parse_image_size(args.image_size), max_model_len)]
    return [*parse_situations(named, lengths)]


def _settings(args: argparse.Namespace, folder: Any, dtype: str, situations: Sequence[AnySituation]) -> dict[str, Any]:
    sending = [situation for situation in situations if situation.sends_requests]
    settings = engine_settings(
        folder,
        dtype=dtype,
        num_threads=args.num_threads,
        max_model_len=max((situation.max_model_len for situation in sending), default=64),
        max_num_seqs=max((situation.num_requests for situation in sending), default=1),
    )
    # Room for the largest situation, not for all sequences at the length of the longest prefill.
    needed = [situation.max_model_len * situation.num_requests for situation in sending]
    return {**settings, "num_kv_tokens": max(needed, default=64), "quantization": args.quantization}
