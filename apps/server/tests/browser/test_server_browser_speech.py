"""The page before a model that only hears: the microphone hears espeak's voice, and the real Whisper tiny.en writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_testkit.real_checkpoints import WHISPER_TINY_EN, real_checkpoint


@pytest.fixture(scope="module")
def hearing(make_live: Any) -> Any:
    folder = real_checkpoint(WHISPER_TINY_EN)
    own = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 27}
    engine = QuireConfig.of(model=str(folder), **own).to_dict()
    return make_live(folder=folder, factory=REAL_FACTORY, engine=engine, config=own)


def test_what_the_microphone_hears_is_written(open_page: Callable[[str], Any], hearing: Any) -> None:
    page = open_page(f"{hearing.url}/")
    assert page.texts(".welcome h2") == ["What was said?"]
    page.send("hello")
    page.wait(lambda: "record a sound" in page.find(".message.assistant").text)
    page.find("#record").click()
    page.wait(lambda: page.all("#record.recording"))
    # Longer than the sentence, which comes again and again, wherever it stands at first.
    page.run("await new Promise((resolve) => setTimeout(resolve, 8000));")
    page.find("#record").click()
    page.wait(lambda: page.all(".message.user audio"))
    page.wait_done()
    # "The price of bread has got up by 10% since January", as far as it survives the browser's codec.
    assert "10% since january" in page.texts(".message.assistant .text")[-1].lower()
    assert page.errors() == []
