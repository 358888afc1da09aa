"""A preparing process: `python -m quire_multimodal.worker FD` reads items from a socket until its owner is gone.

It imports torch only if it is told so: most processors of images and sounds need none, and it takes seconds and memory.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from quire_interfaces import VIDEO_AUDIO_RUNS, Modality, QuireError, RequestError
from quire_multimodal.config import MediaConfig
from quire_multimodal.decode import VideoFrames
from quire_multimodal.image_vectors import ImageVectors, has_image_vectors
from quire_multimodal.processor import ItemProcessor
from quire_multimodal.sound_features import SoundFeatures, has_sound_features
from quire_multimodal.store import write_features
from quire_multimodal.worker_messages import leave_signals_to_owner, receive, send

__all__: list[str] = []

_TORCH = ("torch", "torchvision", "torchaudio")
_MAX_FACT_BYTES = 4096
"""Arrays up to this size go back with the answer: grids of patches, from which positions are counted."""


def main() -> None:
    """Serve the socket whose file descriptor is the first argument."""
    leave_signals_to_owner()
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.dup2(2, 1)  # what libraries print must not be lost, nor taken for an answer
    try:
        settings, _ = receive(connection)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_memory_bytes() // 2, hard))  # whatever size a request asks for
        os.nice(settings["config"]["media_niceness"])
        processor = _load(settings, connection)
        while processor is not None:
            job, data = receive(connection)
            send(connection, _answer(processor, job, data))
    except (EOFError, OSError):
        return  # the owner is gone, and with it whoever could want an answer


def _memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _load(settings: dict[str, Any], connection: socket.socket) -> ItemProcessor | None:
    if not settings["uses_torch"]:
        for name in _TORCH:
            sys.modules[name] = None  # type: ignore[assignment]  # what an import refuses at once
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        folder, config = settings["folder"], MediaConfig(**settings["config"])
        if has_image_vectors(folder):
            processor: ItemProcessor = ImageVectors.of_folder(folder, config)
        elif has_sound_features(folder):
            processor = SoundFeatures.of_folder(folder, config, settings["embed_token_ids"])
        else:
            processor = ItemProcessor.from_folder(folder, config, settings["embed_token_ids"])
    except QuireError as error:
        send(connection, {"error": str(error)})
        return None
    reasons = "; ".join(processor.unusable.values())
    if processor.unusable and not (settings["uses_torch"] and processor.modalities):
        send(connection, {"error": f"{settings['folder']}: {reasons}"})
        return None
    placeholders = {str(each): processor.placeholder(each) for each in processor.modalities}
    send(
        connection,
        {
            "placeholders": placeholders,
            "unusable": processor.unusable,
            "embeds_texts": processor.embeds_texts,
            "frame": processor.frame,
        },
    )
    return processor


def _answer(processor: ItemProcessor, job: dict[str, Any], data: bytes) -> dict[str, Any]:
    """The answer to a job; a bad item is an answer too."""
    modality, arguments = Modality(job["modality"]), job["arguments"]
    try:
        encoded = job["form"] == "encoded"
        value = processor.decode(modality, data, arguments) if encoded else _raw_value(processor, job, data)
        item = processor.process(modality, value, arguments)
        features, num_bytes = write_features(Path(job["path"]), item.features)
    except RequestError as error:
        return {"error": str(error), "code": error.code}
    except MemoryError:
        return {"error": f"there is no memory for this {modality}", "code": "media_too_large"}
    except OSError as error:
        return {"error": f"there is no room for this {modality}: {error}", "code": "media_processing_failed"}
    small = {
        name: array
        for name, array in item.features.items()
        if array.nbytes <= _MAX_FACT_BYTES or name == VIDEO_AUDIO_RUNS
    }
    return {
        "text": item.text,
        "num_embeds": item.num_embeds,
        "embed_token_ids": item.embed_token_ids,
        "features": features,
        "num_bytes": num_bytes,
        "facts": {name: array.tolist() for name, array in small.items() if array.ndim <= 2},
    }


def _raw_value(processor: ItemProcessor, job: dict[str, Any], data: bytes) -> Any:
    """What a caller in Python has decoded already: pixels of an image or of frames, or samples."""
    if job["form"] == "samples":
        return processor.at_its_rate(np.frombuffer(data, np.float32), job.get("rate"))
    pixels = np.frombuffer(data, np.uint8).reshape(job["shape"])
    if job["form"] == "image":
        return PIL.Image.fromarray(pixels)
    return VideoFrames(pixels, job["frame_indices"], job["num_frames"], job["fps"])


if __name__ == "__main__":
    main()
