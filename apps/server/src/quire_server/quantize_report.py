"""How `quire quantize` shows what it does."""

from __future__ import annotations

from pathlib import Path

from quire.assemble import build_renderer
from quire.calibration_text import read_calibration
from quire.config import QuireConfig
from quire.plan import format_bytes
from quire.quantize import quantize_checkpoint
from quire_models import ModelConfig
from quire_models.hub import resolve_model

__all__ = ["print_quantize"]


def print_quantize(
    model: str,
    out: str,
    scheme: str,
    *,
    algorithm: str | None,
    kv_cache_scheme: str | None,
    calibration: str | None,
    calibration_tokens: int,
    revision: str | None,
    use_modelscope: bool = False,
) -> int:
    """Write the checkpoint with a bar of progress on standard error, then a summary."""
    from rich.console import Console
    from rich.progress import Progress

    folder = Path(resolve_model(model, revision, modelscope=use_modelscope))
    sequences: list[list[int]] = []
    if calibration is not None:
        renderer = build_renderer(QuireConfig(), folder, ModelConfig.from_path(folder))
        sequences = read_calibration(calibration, renderer, max_tokens=calibration_tokens)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{scheme}: rounding and writing")
        report = quantize_checkpoint(
            folder,
            out,
            scheme,
            algorithm=algorithm,
            kv_cache_scheme=kv_cache_scheme,
            calibration=sequences,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if sequences:
        print(f"calibrated with {sum(map(len, sequences))} tokens in {len(sequences)} sequences")
    print(f"{report.num_quantized} layers in {scheme}, {len(report.left)} matrices as they were")
    if report.num_kv_scales:
        print(f"scales of keys and values for {report.num_kv_scales} layers; the KV cache is fp8_e4m3 without a flag")
    print(
        f"{format_bytes(report.bytes_before)} -> {format_bytes(report.bytes_after)} in {len(report.files)} files: {out}"
    )
    print(f"compare them: quire eval {out} --text FILE")
    return 0
