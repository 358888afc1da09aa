"""Linear methods: plain and quantized weights."""

from quire_quantization.methods import (
    Float8WeightOnlyLinear,
    Int4WeightOnlyLinear,
    Int8GroupedLinear,
    Int8WeightOnlyLinear,
    PlainLinear,
    W8A8Linear,
    head_method,
    linear_method,
    linear_method_names,
)

__version__ = "0.1.0"

__all__ = [
    "Float8WeightOnlyLinear",
    "Int4WeightOnlyLinear",
    "Int8GroupedLinear",
    "Int8WeightOnlyLinear",
    "PlainLinear",
    "W8A8Linear",
    "head_method",
    "linear_method",
    "linear_method_names",
]
