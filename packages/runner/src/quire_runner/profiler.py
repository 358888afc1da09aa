"""`StepProfiler`: what a rank computes between a start and a stop, as a trace of PyTorch's profiler, or told to Nsight
Systems. Knows torch; knows no step."""

from __future__ import annotations

import os
import re
import reprlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from quire_interfaces.errors import RequestError
from quire_interfaces.platforms import platform_of
from quire_runner.layer_tree import layer_tree
from quire_runner.profiler_config import ProfilerConfig

__all__ = ["StepProfiler"]

_NUM_TABLE_ROWS = 100
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class StepProfiler:
    """Records all threads of this process, whichever calls.

    Args:
        config: What to record.
        device: Of the rank, as torch names it.
        name: Of the rank, in the names of files.
    """

    def __init__(self, config: ProfilerConfig, device: str, name: str) -> None:
        self._config, self._device, self._name = config, device, name
        self._prefix = ""
        self._profile: profile | None = None
        self._is_running = False
        self._is_recording = False
        self._num_steps = 0
        """Begun since the start."""
        self._paths: list[str] = []
        """What was written when `max_iterations` steps were over."""
        # Kineto wants the same thread to start and to stop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-profiler")

    def start(self, prefix: str | None = None) -> None:
        """Begin to record.

        Args:
            prefix: Stands before the names of the files; letters, digits, dots, dashes and underscores.

        Raises:
            RequestError: it records already, it is not configured, or the device or the prefix does not go.
        """
        if self._config.profiler is None:
            raise RequestError(
                "this engine has no profiler: start it with --profiler-config "
                '\'{"profiler": "torch", "torch_profiler_dir": "/folder"}\'',
                code="unsupported",
            )
        if self._is_running:
            raise RequestError("the profiler runs: stop it first", code="busy")
        if prefix is not None and (not isinstance(prefix, str) or _PREFIX.fullmatch(prefix) is None):
            raise RequestError(
                "the prefix must be up to 100 letters, digits, dots, dashes and underscores, and begin with a letter "
                f"or a digit, got {reprlib.repr(prefix)}",
                param="prefix",
            )
        is_cuda = platform_of(self._device).device_type == "cuda"
        if self._config.profiler == "cuda":
            if not is_cuda:
                raise RequestError(
                    f"profiler cuda is for GPUs, and this engine runs on {self._device}: use torch", code="unsupported"
                )
        else:
            Path(self._config.torch_profiler_dir).mkdir(parents=True, exist_ok=True)
        self._prefix, self._is_running = "" if prefix is None else f"{prefix}_", True
        self._num_steps, self._paths = 0, []
        if not self._config.delay_iterations:
            self._begin()

    @property
    def counts_steps(self) -> bool:
        """Whether `before_step` is to be called: steps say when recording begins or ends."""
        return bool(self._config.delay_iterations or self._config.max_iterations)

    def before_step(self) -> None:
        """A step begins: begin or end to record with it, as configured."""
        first, most = self._config.delay_iterations, self._config.max_iterations
        if not self._is_running:
            return
        if self._num_steps == first and not self._is_recording:
            self._begin()
        elif most and self._num_steps == first + most:
            self._paths = self._end()
        self._num_steps += 1

    def stop(self) -> list[str]:
        """End the recording. Paths of the files that it wrote, on this host; none where its first step has not come.

        Raises:
            RequestError: it does not record.
        """
        if not self._is_running:
            raise RequestError("the profiler does not run: start it first", code="not_running")
        self._is_running = False
        return [*self._paths, *self._end()]

    def _begin(self) -> None:
        self._is_recording = True
        if self._config.profiler == "cuda":
            torch.cuda.profiler.start()
            return
        self._profile = self._make_profile(platform_of(self._device).device_type == "cuda")
        self._thread.submit(self._profile.start).result()

    def _end(self) -> list[str]:
        if not self._is_recording:
            return []
        self._is_recording = False
        running, self._profile = self._profile, None
        if running is None:
            torch.cuda.profiler.stop()
            return []
        return self._thread.submit(self._write, running).result()

    def _make_profile(self, is_cuda: bool) -> profile:
        config = self._config
        return profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])],
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )

    def _write(self, running: profile) -> list[str]:
        running.stop()
        place = Path(self._config.torch_profiler_dir) / f"{self._prefix}{self._name}.{os.getpid()}.{time.time_ns()}"
        ending = ".pt.trace.json.gz" if self._config.torch_profiler_use_gzip else ".pt.trace.json"
        paths = [f"{place}{ending}"]
        running.export_chrome_trace(paths[0])
        if self._config.torch_profiler_dump_cuda_time_total:
            by = "self_cuda_time_total" if platform_of(self._device).device_type == "cuda" else "self_cpu_time_total"
            paths.append(f"{place}.operators.txt")
            table = running.key_averages().table(sort_by=by, row_limit=_NUM_TABLE_ROWS)
            Path(paths[1]).write_text(table, encoding="utf-8")
        if self._config.torch_profiler_layer_tree:
            paths.append(f"{place}.layers.txt")
            results = running.profiler.kineto_results if running.profiler else None
            events = results.experimental_event_tree() if results is not None else []
            Path(paths[-1]).write_text(layer_tree(events), encoding="utf-8")
        return paths
