"""Chats of the page: versions, branches, what is kept, found, exported and imported."""

from __future__ import annotations

import json
from typing import Any

from selenium.webdriver.common.keys import Keys


def test_an_edited_question_is_a_new_version_and_the_old_one_stays(scripted_page: Any) -> None:
    page = scripted_page
    page.ask("¤one¥")
    page.ask("¤two¥")
    page.action(".message.user", "Edit")
    box = page.find(".editor textarea")
    assert box.get_attribute("value") == "¤one¥"
    box.send_keys(Keys.CONTROL, "a")
    page.run("arguments[0].value = '¤uno¥';", box)
    box.send_keys(Keys.ENTER)
    page.wait_done()
    assert page.texts(".message .body") == ["¤uno¥", "uno"]
    assert page.messages() == [{"role": "user", "content": "¤uno¥"}]
    assert page.find(".message.user .branches").text == "2/2"
    page.action(".message.user", "Previous version")
    assert page.texts(".message .body") == ["¤one¥", "one", "¤two¥", "two"]
    assert page.find(".message.user .branches").text == "1/2"
    assert not page.find("[aria-label='Previous version']").is_enabled()
    page.action(".message.user", "Next version")
    assert page.texts(".message .body") == ["¤uno¥", "uno"]
    page.action(".message.user", "Edit")
    page.find(".editor textarea").send_keys("never", Keys.ESCAPE)
    assert page.texts(".message.user .body") == ["¤uno¥"]


def test_regenerate_gives_another_answer_and_delete_takes_one_away(page: Any) -> None:
    page.set("#max_completion_tokens", "6")
    page.set("#temperature", "1")
    page.ask("hello")
    first = page.find(".message.assistant .text").text
    page.action(".message.assistant", "Regenerate")
    page.wait_done()
    assert page.find(".message.assistant .branches").text == "2/2"
    assert page.messages() == [{"role": "user", "content": "hello"}]
    page.action(".message.assistant", "Delete")
    assert page.texts(".message.assistant .text") == [first]
    assert page.texts(".branches") == []
    page.action(".message.user", "Delete")
    assert page.texts(".message") == []
    assert page.kept() == []


def test_an_edited_answer_is_what_the_model_is_told(scripted_page: Any) -> None:
    page = scripted_page
    page.ask("¤one¥")
    page.action(".message.assistant", "Edit")
    page.run("arguments[0].value = '**mine**';", page.find(".editor textarea"))
    page.find(".editor .primary").click()
    assert page.find(".message.assistant .text strong").text == "mine"
    assert "edited" in page.find(".message.assistant .figures").text
    page.ask("¤two¥")
    assert page.messages()[1] == {"role": "assistant", "content": "**mine**"}


def test_continue_goes_on_from_the_last_token(page: Any) -> None:
    page.set("#max_completion_tokens", "5")
    page.ask("hello")
    assert "stopped at the limit" in page.find(".message.assistant .figures").text
    before = page.kept()[0]["messages"]
    text = next(each["parts"][0]["text"] for each in before.values() if each["role"] == "assistant")
    page.action(".message.assistant", "Continue")
    page.wait_done()
    body = page.sent()[-1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert body["messages"][-1] == {"role": "assistant", "content": text}
    after = next(each for each in page.kept()[0]["messages"].values() if each["role"] == "assistant")
    assert after["parts"][0]["text"].startswith(text)
    assert len(after["parts"][0]["text"]) > len(text)
    assert after["figures"]["tokens"] == 10


def test_a_branch_is_a_chat_of_its_own(scripted_page: Any) -> None:
    page = scripted_page
    for text in ("one", "two"):
        page.ask(f"¤{text}¥")
    page.action(".message.assistant", "Branch into a new chat")
    assert page.texts(".message .body") == ["¤one¥", "one"]
    page.wait(lambda: page.texts("#conversations .title") == ["¤one¥ (branch)", "¤one¥"])
    page.ask("¤three¥")
    page.find("#conversations li:last-child .title").click()
    assert page.texts(".message.assistant .body") == ["one", "two"]


def test_chats_are_kept_found_renamed_and_deleted(scripted_page: Any) -> None:
    page = scripted_page
    for text in ("apples and pears", "a <b>bold</b> title"):
        page.find("#new").click()
        page.ask(f"¤{text}¥")
    page.driver.refresh()
    page.wait_connected()
    titles = ["¤a <b>bold</b> title¥", "¤apples and pears¥"]
    assert page.texts("#conversations .title") == titles
    assert page.texts(".message") == []
    page.find("#search").send_keys("PEARS apples")
    assert page.texts("#conversations .title") == titles[1:]
    page.find("#search").send_keys(Keys.ENTER)
    assert page.texts(".message.assistant .body") == ["apples and pears"]
    page.find("#search").send_keys(Keys.CONTROL, "a")
    page.find("#search").send_keys("nowhere")
    assert page.find("#conversations").text == "Nothing found"
    page.find("#search").send_keys(Keys.ESCAPE)
    page.find("#conversations li:last-child .title").send_keys(Keys.F2)
    page.find(".rename-box").send_keys("Fruit", Keys.ENTER)
    page.wait(lambda: page.texts("#conversations .title") == [titles[0], "Fruit"])
    page.driver.refresh()
    page.wait_connected()
    assert page.texts("#conversations .title") == [titles[0], "Fruit"]
    page.find("#conversations li:last-child .title").send_keys(Keys.DELETE)
    page.find("dialog .danger").click()
    page.wait(lambda: page.texts("#conversations .title") == titles[:1])
    page.find("#conversations .title").send_keys(Keys.DELETE)
    page.find("dialog[open]").send_keys(Keys.ESCAPE)
    assert len(page.kept()) == 1


def test_what_is_exported_can_be_imported(scripted_page: Any, tmp_path: Any) -> None:
    page = scripted_page
    page.ask("¤<think>Hm.</think>one¥")
    page.action(".message.assistant", "Regenerate")
    page.wait_done()
    # The text of the file that the button hands over.
    page.run(
        "const make = URL.createObjectURL; URL.createObjectURL = (blob) => {"
        "blob.text().then((text) => { window.exported = text; }); return make(blob); };"
    )
    page.find("#export").click()
    exported = page.wait(lambda: page.run("return window.exported ?? null;"))
    kept = page.kept()
    assert json.loads(exported) == {"format": "quire-conversations", "version": 1, "conversations": kept}
    page.find("#clear").click()
    page.find("dialog .danger").click()
    page.wait(lambda: page.kept() == [])
    (tmp_path / "chats.json").write_text(exported)
    page.find("#import-file").send_keys(str(tmp_path / "chats.json"))
    page.wait(lambda: page.find("#note").text == "1 chat imported")
    assert page.kept() == kept
    page.find("#conversations .title").click()
    assert page.find(".message.assistant .branches").text == "2/2"
    for name, text, reason in (
        ("text.json", "no JSON", "the file is no JSON"),
        ("other.json", "[]", "the file holds no exported conversations"),
        ("damaged.json", exported.replace('"parts"', '"p"'), "a conversation in the file is damaged: ¤<think>Hm"),
    ):
        (tmp_path / name).write_text(text)
        page.find("#import-file").send_keys(str(tmp_path / name))
        page.wait(lambda reason=reason: reason in page.find("#note").text)
    assert page.kept() == kept


def test_an_answer_that_is_cut_off_by_a_reload_is_kept_as_far_as_it_came(page: Any) -> None:
    page.set("#max_completion_tokens", "3000")
    page.send("a long story")
    page.wait(lambda: page.kept() and len(page.kept()[0]["messages"]) == 2)
    page.driver.refresh()
    page.wait_connected()
    page.find("#conversations .title").click()
    assert page.find(".message.assistant .text").text != ""
    assert "cut off" in page.find(".message.assistant .figures").text
