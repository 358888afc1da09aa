"""The body of an encoder as an ONNX file, for `quire bench peers --task embed --onnx-model FILE`.

    python export_onnx.py CHECKPOINT FILE            # float32
    python export_onnx.py CHECKPOINT FILE --int8     # products of int8, by ONNX Runtime's own tool

Needs torch, transformers, onnx, onnxscript and onnxruntime, none of Quire.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers


class Body(torch.nn.Module):
    """Token ids and which of them are no padding -> hidden states."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """Both [texts, tokens] int64 -> [texts, tokens, hidden_size]."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def export(checkpoint: str, file: Path) -> None:
    """Write the body in float32."""
    model = transformers.AutoModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(10, 200, (2, 24))
    texts, tokens = torch.export.Dim("texts"), torch.export.Dim("tokens")
    shape = {0: texts, 1: tokens}
    torch.onnx.export(
        Body(model),
        (ids, torch.ones_like(ids)),
        str(file),
        input_names=["input_ids", "attention_mask"],
        output_names=["hidden"],
        dynamic_shapes={"input_ids": shape, "attention_mask": shape},
        dynamo=True,
        external_data=False,
    )


def main() -> None:
    """Export, and quantize if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("file", type=Path)
    parser.add_argument("--int8", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "model.onnx" if args.int8 else args.file
        export(args.checkpoint, plain)
        if args.int8:
            from onnxruntime.quantization import QuantType, quantize_dynamic

            quantize_dynamic(plain, args.file, weight_type=QuantType.QInt8, per_channel=True)


if __name__ == "__main__":
    main()
