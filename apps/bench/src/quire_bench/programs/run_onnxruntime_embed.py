"""ONNX Runtime on a body that was exported to ONNX, and the mean of each text's hidden states, normalized."""

from __future__ import annotations

from typing import Any

from batches import padded_batches
from program import Run, serve


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    import numpy
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    if settings["num_threads"]:
        options.intra_op_num_threads = settings["num_threads"]
    session = onnxruntime.InferenceSession(settings["file"], options, providers=["CPUExecutionProvider"])
    names = {each.name for each in session.get_inputs()}

    def run(prompts: list[list[int]], output_lens: list[int]) -> None:
        for ids, mask in padded_batches(prompts):
            kept = numpy.array(mask, dtype=numpy.int64)
            inputs = {"input_ids": numpy.array(ids, dtype=numpy.int64), "attention_mask": kept}
            if "token_type_ids" in names:
                inputs["token_type_ids"] = numpy.zeros_like(kept)
            hidden = session.run(None, inputs)[0]
            mean = (hidden * kept[..., None]).sum(1) / kept.sum(1, keepdims=True)
            mean / numpy.linalg.norm(mean, axis=-1, keepdims=True)

    return run, onnxruntime.__version__


if __name__ == "__main__":
    serve(load)
