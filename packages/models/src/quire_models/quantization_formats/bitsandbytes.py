"""bitsandbytes, as Transformers writes it. Free of torch."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.quantization_config import QuantizationConfig
from quire_models.quantization_formats.reading import WHERE_WIDENED, layer_names, unsupported

__all__ = ["parse_bitsandbytes"]

_WEIGHT_ONLY = "activations stay as they are (weight-only)"


def parse_bitsandbytes(fields: Fields) -> QuantizationConfig:
    """Codes of four bits, or whole numbers of eight."""
    fields.skip("quant_method", "_load_in_*", "bnb_4bit_*", "llm_int8_*", "load_in_4bit", "load_in_8bit")
    names = ("lm_head", *layer_names(fields, "llm_int8_skip_modules"))
    if fields.flag("load_in_8bit", default=False):
        return QuantizationConfig(
            layout="bitsandbytes8", bits=8, group_size=None, granularity="channel", ignored=names, note=_WEIGHT_ONLY
        )
    code = fields.text("bnb_4bit_quant_type", default="fp4")
    storage = fields.text("bnb_4bit_quant_storage", default="uint8")
    if not fields.flag("load_in_4bit", default=False) or code not in ("nf4", "fp4") or storage != "uint8":
        raise unsupported(fields.source, f"bitsandbytes with {code!r} stored as {storage} (4 bits as uint8, and 8 are)")
    return QuantizationConfig(
        layout="bitsandbytes4",
        bits=4,
        group_size=None,
        granularity="block",
        weight_name=code,
        scale_name="nested" if fields.flag("bnb_4bit_use_double_quant", default=False) else "absmax",
        ignored=names,
        note=WHERE_WIDENED,
    )
