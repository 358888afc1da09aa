"""What every `Renderer` must do, as tests to inherit.

class TestMyRenderer(RendererSuite):
    def make_renderer(self): return MyRenderer(...)
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from quire_interfaces import Renderer, RequestError

__all__ = ["RendererSuite"]

CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "hello fox"},
    {"role": "assistant", "content": "hello dog"},
    {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "now"}]},
]


class RendererSuite:
    """Tests of the `Renderer` contract. Implement `make_renderer`; override nothing else."""

    def make_renderer(self) -> Renderer:
        """A fresh renderer with a chat template that writes each message's content as it is."""
        raise NotImplementedError(f"{type(self).__name__} does not implement make_renderer")

    def test_text_prompts_are_what_the_tokenizer_says(self) -> None:
        renderer = self.make_renderer()
        for add_special_tokens in (True, False):
            rendered = renderer.render_prompt("the fox", add_special_tokens=add_special_tokens)
            expected = renderer.tokenizer.encode("the fox", add_special_tokens=add_special_tokens)
            assert (rendered.token_ids, rendered.text) == (expected, "the fox")

    def test_token_id_prompts_pass_through(self) -> None:
        rendered = self.make_renderer().render_prompt([3, 1, 2])
        assert (rendered.token_ids, rendered.text) == ([3, 1, 2], None)

    @pytest.mark.parametrize("prompt", [[], [-1], [2**40], [True], [1.5], ["1"], None, 5])
    def test_bad_prompts_are_request_errors(self, prompt: Any) -> None:
        with pytest.raises(RequestError) as caught:
            self.make_renderer().render_prompt(prompt)
        assert (caught.value.param or "").startswith("prompt")

    def test_chat_ids_are_those_of_the_text(self) -> None:
        renderer = self.make_renderer()
        for count in (1, 2, 3):
            rendered = renderer.render_chat(CONVERSATION[:count])
            assert rendered.text is not None
            assert rendered.token_ids == renderer.tokenizer.encode(rendered.text, add_special_tokens=False)
            assert 0 <= rendered.num_reused_tokens <= len(rendered.token_ids)

    def test_every_message_is_in_the_text(self) -> None:
        text = self.make_renderer().render_chat(CONVERSATION).text or ""
        assert -1 < text.find("hello fox") < text.find("hello dog") < text.find("and now")

    def test_the_order_of_conversations_does_not_matter(self) -> None:
        warm = self.make_renderer()
        for count in (3, 1, 2, 3, 3):
            cold = self.make_renderer().render_chat(CONVERSATION[:count])
            rendered = warm.render_chat(CONVERSATION[:count])
            assert (rendered.token_ids, rendered.text) == (cold.token_ids, cold.text)

    def test_a_result_can_be_changed_by_its_owner(self) -> None:
        renderer = self.make_renderer()
        first = renderer.render_chat(CONVERSATION)
        expected = list(first.token_ids)
        first.token_ids.clear()
        assert renderer.render_chat(CONVERSATION).token_ids == expected

    def test_the_callers_messages_stay_as_they_are(self) -> None:
        messages = copy.deepcopy(CONVERSATION)
        self.make_renderer().render_chat(messages)
        assert messages == CONVERSATION

    def test_the_last_message_can_be_continued(self) -> None:
        rendered = self.make_renderer().render_chat(
            CONVERSATION[:2], add_generation_prompt=False, continue_final_message=True
        )
        assert (rendered.text or "").endswith("hello dog")

    def test_a_template_of_the_request_is_used(self) -> None:
        rendered = self.make_renderer().render_chat(
            CONVERSATION, chat_template="{{ messages | length }} {{ mood }}", chat_template_kwargs={"mood": "calm"}
        )
        assert rendered.text == "3 calm"

    @pytest.mark.parametrize(
        ("messages", "param"),
        [
            ([], "messages"),
            ([{"content": "no role"}], "messages[0].role"),
            ([CONVERSATION[0], "text"], "messages[1]"),
            ([{"role": "user", "content": 5}], "messages[0].content"),
        ],
    )
    def test_bad_messages_name_the_message(self, messages: Any, param: str) -> None:
        with pytest.raises(RequestError) as caught:
            self.make_renderer().render_chat(messages)
        assert caught.value.param == param

    @pytest.mark.parametrize("template", ["{% if %}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"])
    def test_a_failing_template_is_a_request_error(self, template: str) -> None:
        with pytest.raises(RequestError):
            self.make_renderer().render_chat(CONVERSATION, chat_template=template)
