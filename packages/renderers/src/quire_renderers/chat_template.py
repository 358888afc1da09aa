"""Messages to text through a jinja2 chat template.

Knows which variables templates expect (the conventions of Hugging Face's chat templating guide) and turns every
failure of a template into a RequestError; the sandbox is in template_sandbox.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from quire_interfaces import RequestError
from quire_renderers.messages import plain_value, softened
from quire_renderers.template_content import TemplateContent
from quire_renderers.template_roles import TemplateRoles, narrowed
from quire_renderers.template_sandbox import TemplateLimitError, TemplateRaisedError, TemplateSandbox

__all__ = ["ChatTemplates", "Conversation"]

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
_MAX_COMPILED = 32
_MAX_TEMPLATE_CHARS = 200_000
# Private-use characters: no template trims them and no model output holds this run of them.
_CONTINUE_MARK = "\ue000\uf8fe\ue001\uf8fd"


class Conversation:
    """What a template is given.

    Args:
        messages: As prepare_messages returns them.
        tools: As prepare_tools returns them.
        add_generation_prompt: Ask for the head of the assistant's turn at the end.
        continue_final_message: End the text inside the last message, which the model then continues.
        extra: Further variables of the request (chat_template_kwargs).

    Raises:
        RequestError: the parts contradict each other, or an extra variable has a reserved name.
    """

    __slots__ = ("add_generation_prompt", "continue_final_message", "extra", "messages", "tools")

    def __init__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        extra: Mapping[str, Any] | None,
    ) -> None:
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true; set one to false",
                param="continue_final_message",
            )
        if continue_final_message and not isinstance(messages[-1].get("content"), str):
            raise RequestError(
                "continue_final_message needs text in the last message's content to continue, found none",
                param=f"messages[{len(messages) - 1}].content",
            )
        self.messages = messages
        self.tools = tools
        self.add_generation_prompt = add_generation_prompt
        self.continue_final_message = continue_final_message
        self.extra = checked_template_kwargs(extra)


class _Template(NamedTuple):
    """One template, compiled."""

    program: jinja2.Template
    content: TemplateContent
    roles: TemplateRoles
    knows_developer: bool
    """Whether it tells OpenAI's newer word for `system` apart."""

    def adapted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with the roles, and in the order, that the template takes."""
        if not self.knows_developer:
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        return self.roles.adapted(messages)


class ChatTemplates:
    """The named templates of a model. Thread-safe.

    Args:
        named: "default", "tool_use" (used when tools are given), and others that a request may name.
        special_tokens: bos_token, eos_token, ... as templates see them.
        sandbox: Where they run.
        placeholders: Token that stands for an item in a prompt, by modality; none for a model that reads text only.

    Raises:
        RequestError: when the default template does not compile (found at the first rendering).
    """

    def __init__(
        self,
        named: Mapping[str, str],
        special_tokens: Mapping[str, str],
        sandbox: TemplateSandbox,
        placeholders: Mapping[str, str] | None = None,
    ) -> None:
        self._named = dict(named)
        self._special_tokens = dict(special_tokens)
        self._sandbox = sandbox
        self._placeholders = placeholders or {}
        self._compiled: OrderedDict[str, _Template] = OrderedDict()
        self._lock = threading.Lock()

    def names_roles(self, roles: Sequence[str]) -> bool:
        """Whether the model's own template speaks of all these roles."""
        text = self._named.get("default", "")
        return all(f"'{role}'" in text or f'"{role}"' in text for role in roles)

    def render_as_given(
        self,
        messages: Sequence[tuple[str, str | list[dict[str, Any]]]],
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages as text, in their order and with their roles, which no conversation has.

        Args:
            messages: (role, content) of each; a content is text, or parts as prepare_messages returns them.
            chat_template: As for `render`.
            chat_template_kwargs: Further variables of the template.

        Raises:
            RequestError: no template, or it does not compile, fails or refuses the messages.
        """
        template = self._compile(self._choose(chat_template, False))
        conversation = Conversation(
            [{"role": role, "content": content} for role, content in messages],
            None,
            add_generation_prompt=True,
            continue_final_message=False,
            extra=chat_template_kwargs,
        )
        of_pairs = template._replace(content=template.content.of_pairs)
        return self._render(of_pairs, conversation, conversation.messages)

    def render(self, conversation: Conversation, chat_template: str | None = None) -> str:
        """The conversation as text.

        Args:
            conversation: What to render.
            chat_template: A template, or the name of one of the model's; None chooses the model's own.

        Raises:
            RequestError: no template, or it does not compile, fails or refuses the conversation.
        """
        template = self._compile(self._choose(chat_template, conversation.tools is not None))
        messages = template.adapted(conversation.messages)
        refusal: RequestError | None = None
        for change in (list, softened, narrowed):
            changed = change(messages)
            if refusal is not None and changed in (None, messages):
                continue
            messages = changed or messages
            try:
                return self._render(template, conversation, messages)
            except RequestError as error:
                refusal = refusal or error
                if error.code == "chat_template_limit":
                    break
        assert refusal is not None
        raise refusal

    def check(self) -> None:
        """Compile every template now, and find out what it takes. Raises RequestError when one does not compile."""
        for source in self._named.values():
            _ = self._compile(source).roles.needed

    def frames(self) -> str:
        """What the model's own templates write around the turns of small conversations."""
        texts: list[str] = []
        for source in self._named.values():
            with contextlib.suppress(RequestError):
                texts.append(self._compile(source).roles.frame)
        return "\n".join(texts)

    def _render(self, template: _Template, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        if conversation.continue_final_message:
            last = {**messages[-1], "content": messages[-1]["content"] + _CONTINUE_MARK}
            messages = [*messages[:-1], last]
        messages = template.content.formed(messages)
        variables = self._variables(messages, conversation.tools)
        variables |= {**conversation.extra, "add_generation_prompt": conversation.add_generation_prompt}
        text = self._run(template.program, variables)
        return _cut_at_mark(text) if conversation.continue_final_message else text

    def _variables(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        return {**self._special_tokens, "documents": None, "messages": messages, "tools": tools}

    def _template(self, program: jinja2.Template, *, knows_developer: bool) -> _Template:
        """A compiled template with what is found out about it, each when it is first needed."""
        spent = False

        def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str | None:
            nonlocal spent
            if spent:  # a template that runs without end is not asked again
                return None
            variables = {**self._variables(messages, tools), "add_generation_prompt": True}
            try:
                return self._run(program, variables)
            except RequestError as error:
                spent = error.code == "chat_template_limit"
                return None

        content = TemplateContent(render, self._placeholders)
        roles = TemplateRoles(lambda messages, tools: render(content.formed(messages), tools))
        return _Template(program, content, roles, knows_developer)

    def _choose(self, chat_template: str | None, has_tools: bool) -> str:
        if chat_template is not None:
            return self._named.get(chat_template, chat_template)
        if has_tools and "tool_use" in self._named:
            return self._named["tool_use"]
        if "default" in self._named:
            return self._named["default"]
        if self._named:
            names = ", ".join(sorted(self._named))
            raise RequestError(
                f"this model has several chat templates and no default; name one as chat_template: {names}",
                param="chat_template",
            )
        raise RequestError(
            "this model has no chat template; give one as chat_template, or use the completions API",
            param="messages",
            code="no_chat_template",
        )

    def _compile(self, source: str) -> _Template:
        with self._lock:
            template = self._compiled.get(source)
            if template is not None:
                self._compiled.move_to_end(source)
                return template
        if not isinstance(source, str) or len(source) > _MAX_TEMPLATE_CHARS:
            message = f"chat_template must be a text of at most {_MAX_TEMPLATE_CHARS} characters"
            raise RequestError(message, param="chat_template")
        try:
            program = self._sandbox.compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            message = f"the chat template does not compile: line {error.lineno}: {error.message}"
            raise RequestError(message, param="chat_template") from error
        except Exception as error:  # the compiler trips over odd trees: deep nesting, bad constants
            message = f"the chat template does not compile: {type(error).__name__}: {error}"
            raise RequestError(message, param="chat_template") from error
        template = self._template(program, knows_developer="developer" in source)
        with self._lock:
            self._compiled[source] = template
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return template

    def _run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        try:
            return self._sandbox.run(template, variables)
        except TemplateRaisedError as error:
            message = f"the chat template refuses these messages: {error}"
            raise RequestError(message, param="messages", code="chat_template_refused") from error
        except TemplateLimitError as error:
            message = f"the chat template was stopped: {error}"
            raise RequestError(message, param="messages", code="chat_template_limit") from error
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template failed: {error}", param="messages") from error
        except Exception as error:  # a template is a program: it can fail in every way a program can
            message = f"the chat template failed on these messages: {type(error).__name__}: {error}"
            raise RequestError(message, param="messages") from error


def checked_template_kwargs(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables for a chat template beside messages and tools, as plain values.

    Raises:
        RequestError: a name that templates cannot use or that has a field of its own, or a value that is no JSON.
    """
    checked: dict[str, Any] = {}
    for name, value in (extra or {}).items():
        where = f"chat_template_kwargs.{name}"
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise RequestError(f"{where} is no name a template can use", param=where)
        if name in _RESERVED:
            raise RequestError(f"{where} is reserved; use the request's own field {name}", param=where)
        checked[name] = plain_value(value, where)
    return checked


def _cut_at_mark(text: str) -> str:
    position = text.rfind(_CONTINUE_MARK)
    if position < 0:
        raise RequestError(
            "the chat template leaves out or changes the last message's content, so it cannot be continued; "
            "set continue_final_message to false",
            param="continue_final_message",
        )
    return text[:position]
