"""docs/models.md: which architectures there are and how they did, written from verdicts. Free of torch.

Each row carries a digest of the family's own files and of its case, so that a test can tell a table that is stale
without verifying anything.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import quire_models
from quire_models.composite import language_part
from quire_models.registry import FALLBACK, NATIVE_TYPES, architecture_entry
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.coverage import coverage_text
from quire_testkit.parity.fallback_cases import RECURRENT_FALLBACKS
from quire_testkit.parity.media_cases import MEDIA_CASES

if TYPE_CHECKING:
    from quire_testkit.parity.verify import Verdict

__all__ = ["digest", "read_digests", "update_table"]

_ROW = re.compile(r"^\| (\w+) \| .* \| `([0-9a-f]+)` \|$")

HEADER = """# Architectures

Every architecture below gives the same greedy tokens as Hugging Face Transformers, 64 of them, in each situation, and
logits within a tolerance. The figure is the largest error of a logit as a share of the largest logit, in float32, over
a tiny random checkpoint of the Transformers class; for int8 weights it is the distance to the float32 logits.

- **whole prefill**, **chunks of 1, 7, 64**: how the prompt is cut.
- **with strangers**: in a batch with other requests that come and go. **prefix hit**: the prompt is in the prefix
  cache. **preempted**: twice thrown out and computed again. **asynchronous**: scheduled one step ahead. **all at
  once**: these together.
- Networks with an encoder and a decoder: the prompt is the decoder's, behind another text for the encoder. Encoders
  alone: hidden states instead of logits, of a text by itself and beside others; nothing else applies to them. With a
  head: logits of classes, or weights of words (...ForMaskedLM, as SPLADE makes them of logits). Every native decoder
  also loads as ...Model, ...ForSequenceClassification and ...ForTokenClassification, which have no rows here.
- Networks with towers take images or sounds: of prompts with none, one, two and five items, the largest error (of a
  prompt with one for Voxtral Realtime, which takes no other); with strangers that have other items. Their language
  model is native or a fallback, so are their towers.
- **bfloat16**: computed in it; at most twice as far from the float32 logits as Transformers is in bfloat16.
- *native* networks are Quire's own. *fallback* ones are Transformers', with Quire's attention, cache and scheduler: any
  decoder of Transformers that lets its attention be exchanged runs so, those below have been verified. They take
  safetensors, quantized or not (routed experts in floating point), `--quantization`, adapters and several ranks; code
  that a checkpoint brings runs with `--trust-remote-code`. What cannot run is refused at the start, with the reason.

Where a rotation depends on how long a sequence has grown, Transformers rotates all of it anew; keys in a cache that
requests share keep the rotation that they got. `longrope` (Phi-3 and Phi-4): the long factors where `--max-model-len`
is more than the original context, for short sequences too, else the short ones. `dynamic`: each token by the length at
which it was the last one.

`quire verify ARCHITECTURE` (or a checkpoint folder) prints the same for one; `quire verify --table docs/models.md`
makes this table. The digest is that of its family's source files (for a fallback the backend's) and its test
configuration: a test fails when they have changed and the table has not. The test suite verifies all native networks,
and of the fallbacks one for each way in which the backend treats a network.

"""


def digest(architecture: str) -> str:
    """Of the files of the architecture's family, or of the fallback backend, and of its case."""
    case = CASES.get(architecture)
    state = hashlib.sha256(str(None if case is None else case.as_written).encode())
    entry = architecture_entry(_text_architecture(architecture) or architecture)
    root = Path(quire_models.__file__).parent
    family = entry.family or entry.model_type
    files = [root / "families" / f"{family}.py", root / "families" / f"{family}_layers.py"]
    if not entry.is_native:
        files = [root / entry.model_type / name for name in ("config.py", "model.py")]
    if architecture in RECURRENT_FALLBACKS:
        files += [root / entry.model_type / name for name in ("chosen_class.py", "recurrent.py", "recurrent_config.py")]
    if architecture in MEDIA_CASES:
        files += [root / FALLBACK.model_type / name for name in ("class_encoders.py", "media_inputs.py", "towers.py")]
    for file in _with_shared_layers(filter(Path.is_file, files)):
        state.update(file.name.encode() + b"\0" + file.read_bytes())
    return state.hexdigest()[:10]


def _with_shared_layers(files: Iterable[Path]) -> list[Path]:
    """Files, and those of other families whose modules they use."""
    found = list(files)
    for file in found:  # grows on the way
        names = re.findall(r"quire_models\.families\.(\w+_layers)\b", file.read_text())
        found += dict.fromkeys(
            shared for name in names if (shared := file.parent / f"{name}.py") not in found and shared.is_file()
        )
    return found


def read_digests(path: Path) -> dict[str, str]:
    """Architecture -> digest, of the table's rows."""
    return {name: match[2] for name, match in _rows(path).items()}


def update_table(path: Path, verdicts: Iterable[Verdict]) -> None:
    """Write the rows of the verdicts into the file; other rows stay, those of architectures that are gone go."""
    rows = {name: match[0] for name, match in _rows(path).items() if name in CASES}
    names: list[str] = []
    for verdict in verdicts:
        names = list(verdict.errors)
        figures = " | ".join("-" if math.isnan(error) else f"{error:.0e}" for error in verdict.errors.values())
        kind = _kind(verdict.architecture)
        rows[verdict.architecture] = (
            f"| {verdict.architecture} | {kind} | {figures} | `{digest(verdict.architecture)}` |"
        )
    head = f"| architecture | network | {' | '.join(names)} | digest |\n|{'---|' * (len(names) + 3)}\n"
    path.write_text(
        HEADER + head + "\n".join(rows[name] for name in sorted(rows)) + "\n" + coverage_text(), encoding="utf-8"
    )


def _kind(architecture: str) -> str:
    """Whose network it is; of one that takes media, whose language model, and that its towers are Transformers'."""
    text = _text_architecture(architecture)
    kind = "native" if architecture_entry(text or architecture).is_native else "fallback"
    return f"{kind} + towers" if architecture in MEDIA_CASES else kind


def _text_architecture(architecture: str) -> str:
    """The language model of a case that takes media; empty for one of text alone, and for one without a network of
    Quire's own."""
    fields = (
        {**MEDIA_CASES[architecture].fields, "architectures": [architecture]} if architecture in MEDIA_CASES else {}
    )
    part = language_part(fields, architecture, NATIVE_TYPES)
    return "" if part is None else part.architecture


def _rows(path: Path) -> dict[str, re.Match[str]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {match[1]: match for match in map(_ROW.match, lines) if match}
