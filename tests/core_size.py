"""Lines of code of the core: `python tests/core_size.py`.

The core is what a plain request needs, without optional features. A model is loaded, prompts and a conversation are
answered, greedily and sampled, by the public API with its defaults, and every function of Quire that runs is noted;
what counts are the lines of code of these functions, without blank lines, comments and docstrings, and without what
stands outside of functions (imports, constants, fields). What runs of the packages of optional features is printed
beside it.
"""

from __future__ import annotations

import ast
import io
import sys
import threading
import tokenize
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT = 10_000
"""Lines of code that the core stays under."""
OPTIONAL = {
    "quire_distributed": "several ranks",
    "quire_kernels_cuda": "kernels for NVIDIA GPUs",
    "quire_kernels_rocm": "kernels for AMD GPUs",
    "quire_kv_transfer": "tiers behind the KV cache",
    "quire_lora": "adapters",
    "quire_pooling": "embeddings, classes and scores",
    "quire_quantization": "quantization",
    "quire_spec_decode": "drafts",
    "quire_speech": "speech to text",
    "quire_structured_output": "grammars",
}
"""Packages of optional features."""
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
}  # fmt: skip


def running_functions() -> dict[Path, set[tuple[str, int]]]:
    """Source file -> name and first line of each function in it that runs for plain requests."""
    functions: dict[Path, set[tuple[str, int]]] = defaultdict(set)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            functions[Path(code.co_filename)].add((code.co_name, code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        from quire import LLM, SamplingParams

        llm = LLM()
        llm.generate(["Hello", "Two plus two is"] * 4, SamplingParams(max_tokens=8))
        llm.generate(["Hello"], SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=1))
        llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=8))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return functions


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines that hold code."""
    documentation: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - documentation


def core_size() -> Counter[str]:
    """Package -> lines of code of its functions that run."""
    sizes: Counter[str] = Counter()
    for path, functions in running_functions().items():
        source = path.read_text()
        tree = ast.parse(source)
        lines: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if (node.name, first) in functions:
                    lines.update(range(first, (node.end_lineno or first) + 1))
        parts = path.relative_to(ROOT).parts
        if "src" in parts:
            sizes[parts[parts.index("src") + 1]] += len(lines & code_lines(source, tree))
    return sizes


if __name__ == "__main__":
    table = core_size()
    for package, size in table.most_common():
        print(f"{size:6} {package}" + (f" (optional: {OPTIONAL[package]})" if package in OPTIONAL else ""))
    optional = sum(size for package, size in table.items() if package in OPTIONAL)
    print(f"{optional:6} lines of code of optional features that a plain request passes")
    print(f"{sum(table.values()) - optional:6} lines of code in the core; at most {LIMIT}")
