"""What importing and using the package must not load."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "huggingface_hub", "numpy")


def test_rendering_loads_nothing_heavy(tokenizer_folder):
    folders = [str(tokenizer_folder(kind)) for kind in ("byte_level", "byte_fallback_prepend", "sentencepiece_bpe")]
    program = f"""
import sys
from quire_renderers import ChatRenderer, IncrementalDetokenizer, load_tokenizer
for folder in {folders!r}:
    tokenizer = load_tokenizer(folder)
    rendered = ChatRenderer(tokenizer, "{{{{ messages[0].content }}}}").render_chat([dict(role="user", content="fox")])
    IncrementalDetokenizer(tokenizer).add(rendered.token_ids)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_public_names_exist():
    import quire_renderers

    assert sorted(quire_renderers.__all__) == quire_renderers.__all__
    assert all(hasattr(quire_renderers, name) for name in quire_renderers.__all__)
