"""Renders a model's chat template in Jinja's sandbox, with the names that transformers gives to templates.

Knows messages as plain dicts and gives text; which pieces of the text are control tokens is the tokenizer's business.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template refused these messages, or could not render them; carries the template's own words."""


class _GenerationBlocks(jinja2.ext.Extension):
    """Accepts ``{% generation %}...{% endgeneration %}``, which marks text for training and prints like the rest."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares an instance variable)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a prompt is not
    return json.dumps(value, **({"ensure_ascii": False} | options))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """One compiled template. ``variables`` are the tokenizer's special tokens by name (bos_token, eos_token, ...)."""

    def __init__(self, text: str, *, variables: Mapping[str, str]) -> None:
        """Raises ValueError for a template that does not compile."""
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"model.chat_template: line {error.lineno}: {error.message}") from None
        self._variables = dict(variables)
        self.hash = hashlib.sha256(text.encode()).hexdigest()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text.

        Raises:
            ChatTemplateError: no messages, a message without text, or the template raised.
        """
        if not messages:
            raise ChatTemplateError("messages is empty")
        turns = [_turn(message, index) for index, message in enumerate(messages)]
        known = self._variables | dict(variables or {})
        try:
            return self._template.render(messages=turns, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **known)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is code: whatever it raises is about these messages
            raise ChatTemplateError(str(error) or type(error).__name__) from error


def _turn(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The message as templates expect it: absent keys instead of nulls, and an empty text beside tool calls."""
    turn = {key: value for key, value in message.items() if value is not None}
    if turn.get("tool_calls"):
        turn.setdefault("content", "")
    if not isinstance(turn.get("content"), (str, list)):
        raise ChatTemplateError(f"message {index} ({turn.get('role', 'no role')}) has no text in content")
    return turn


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with every string in it, at any depth and dict keys included, put through ``change``."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change) for item in value]
    return value
