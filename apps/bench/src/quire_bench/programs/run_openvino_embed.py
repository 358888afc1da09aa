"""OpenVINO on a body in its own format or in ONNX, and the mean of each text's hidden states, normalized.

Float32 is asked for where the comparison is of float32: by itself OpenVINO computes in bfloat16 on processors that can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batches import padded_batches
from program import Run, serve


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    import numpy
    import openvino

    properties: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
    if settings["num_threads"]:
        properties["INFERENCE_NUM_THREADS"] = settings["num_threads"]
    if settings["dtype"] == "float32":
        properties["INFERENCE_PRECISION_HINT"] = "f32"
    path = Path(settings["file"])
    file = path / "openvino_model.xml" if path.is_dir() else path
    request = openvino.Core().compile_model(str(file), "CPU", properties).create_infer_request()
    names = {name for each in request.model_inputs for name in each.get_names()}

    def run(prompts: list[list[int]], output_lens: list[int]) -> None:
        for ids, mask in padded_batches(prompts):
            kept = numpy.array(mask, dtype=numpy.int64)
            inputs = {"input_ids": numpy.array(ids, dtype=numpy.int64), "attention_mask": kept}
            if "token_type_ids" in names:
                inputs["token_type_ids"] = numpy.zeros_like(kept)
            request.infer(inputs)
            hidden = request.get_output_tensor(0).data
            mean = (hidden * kept[..., None]).sum(1) / kept.sum(1, keepdims=True)
            mean / numpy.linalg.norm(mean, axis=-1, keepdims=True)

    return run, openvino.__version__


if __name__ == "__main__":
    serve(load)
