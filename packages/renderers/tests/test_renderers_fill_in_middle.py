"""Which tokenizers can fill a gap, and what their models are asked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from quire_interfaces import RequestError
from quire_renderers import ChatRenderer, load_tokenizer

FAMILIES = {
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"): "PASBM",
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"): "PASBM",
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"): "PASBM",
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"): "SBPAM",
    ("[PREFIX]", "[SUFFIX]"): "SBPA",
}
"""Markers -> order of prefix marker P, text before A, suffix marker S, text behind B, middle marker M."""


@pytest.mark.parametrize("markers", FAMILIES, ids=lambda markers: markers[0])
def test_the_gap_is_marked_as_the_model_knows_it(
    tokenizer_folder: Callable[[str], Path], tmp_path: Path, markers: tuple[str, ...]
) -> None:
    folder = shutil.copytree(tokenizer_folder("byte_level"), tmp_path / "fim")
    plain = ChatRenderer(load_tokenizer(folder))
    assert plain.fill_in_middle is None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(markers))
    tokenizer.save(str(folder / "tokenizer.json"))
    renderer = ChatRenderer(load_tokenizer(folder))
    form = renderer.fill_in_middle
    assert form is not None
    before, behind = "x = f(", ") + 42\n"
    ids = {"A": plain.tokenizer.encode(before), "B": plain.tokenizer.encode(behind)}
    ids |= {letter: [tokenizer.token_to_id(marker)] for letter, marker in zip("PSM", markers, strict=False)}
    rendered = renderer.render_prompt(form.prompt(before, behind), add_special_tokens=False)
    assert rendered.token_ids == [token for letter in FAMILIES[markers] for token in ids[letter]]
    for name, texts in (("prompt", ("a" + markers[0], "b")), ("suffix", ("a", markers[1]))):
        with pytest.raises(RequestError) as caught:
            form.prompt(*texts)
        assert caught.value.param == name
