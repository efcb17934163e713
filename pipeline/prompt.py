"""Columns to messages to token ids: the one place where a row becomes what the model reads.

Knows no file, no engine and no model; the tokenizer is handed in and owns the chat template.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine import Grammar, SamplingParams
from pipeline.overflow import MODES, Overflow
from pipeline.response_format import job_format, row_format
from pipeline.row_template import RowTemplate, text_of
from pipeline.types import RowError

Message = dict[str, Any]
_LOG = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What prompts need of a tokenizer. A chat template that raises shows up as any exception with its message."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]: ...

    def hide_control_words(self, text: str) -> str:
        """``text`` for use in a larger one: ``encode_batch`` then takes the control words in it for plain text."""
        ...

    def token_ends(self, text: str) -> Sequence[int]:
        """For each token of a plain ``text`` the place in it just behind that token."""
        ...

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        control_words: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """A conversation as text, to be encoded without ``add_special_tokens``."""
        ...


class _Text(NamedTuple):
    """A prompt that is to be encoded: raw text, which gets the tokenizer's special tokens, or a chat template's."""

    text: str
    is_raw: bool


class Prompt(NamedTuple):
    """The ids that the model reads; ``is_cut`` says that there were more (``prompt.on_overflow``)."""

    token_ids: list[int]
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How rows become prompts.

    ``system`` (or the text of ``system_file``) goes before every conversation that has no system message of its own.
    ``template`` (or ``template_file``) is Jinja over the row's columns; with one, the prompt columns are plain data.
    ``response_format`` (or ``response_format_file``) is the form of every answer, as JSON text: OpenAI's response_format, or
    of type regex or choice. ``messages_column`` is where conversations are read from. Control words such as <|im_end|> in
    what a row brings are plain text, unless ``control_words`` says that they are control tokens. A conversation that ends
    with the assistant's message is refused, unless ``continue_final_message`` says that the answer goes on from there.
    ``on_overflow`` is what becomes of a prompt that leaves no room for ``max_tokens`` (see ``pipeline.overflow``): with error
    it stays as it is, and is an error row where the context cannot hold it at all.
    """

    system: str | None = None
    system_file: str | None = None
    template: str | None = None
    template_file: str | None = None
    response_format: str | None = None
    response_format_file: str | None = None
    messages_column: str = "messages"
    control_words: bool = False
    continue_final_message: bool = False
    on_overflow: str = "error"

    def __post_init__(self) -> None:
        if self.on_overflow not in MODES:
            raise ValueError(f"prompt.on_overflow: {self.on_overflow!r} is not one of {', '.join(MODES)}")
        for key in ("system", "template", "response_format"):
            if getattr(self, key) is not None and getattr(self, f"{key}_file") is not None:
                raise ValueError(f"prompt.{key} and prompt.{key}_file: give one of the two")

    def text(self, key: str) -> str | None:
        """The text of ``system``, ``template`` or ``response_format``, from its file where it is given as one.

        Raises:
            ValueError: the file is missing or is no UTF-8; the message names the key.
        """
        path = getattr(self, f"{key}_file")
        if path is None:
            inline: str | None = getattr(self, key)
            return inline
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"prompt.{key}_file: cannot read {path!r}: {error}") from error


class Prompts:
    """Builds prompts and sampling for rows; ``chat`` wraps text in a user message and applies the chat template.

    ``messages`` rows always go through the chat template, ``prompt_token_ids`` never. A row may fill one of the three
    prompt columns. Empty text is an error row; blanks are text. A conversation ends in an open assistant turn; one with a
    system message only is an error row. ``max_model_len`` is what prompts are cut for, where ``options`` say that they are;
    they leave room for what the row's sampling may generate, or none where no ``answers`` follow.

    Attributes:
        defaults: the job's sampling, which a row's ``sampling_params`` go before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        options: PromptOptions,
        sampling: SamplingParams,
        chat: bool,
        answers: bool = True,
        max_model_len: int | None = None,
    ) -> None:
        """Raises ValueError for settings that contradict each other or a template that does not compile."""
        self.tokenizer = tokenizer
        self._messages_column = options.messages_column
        self.defaults = sampling
        self._chat = chat
        self._answers = answers
        self._control_words = options.control_words
        self._continues = options.continue_final_message
        self._warned = False
        self._form = job_format(options.text("response_format"))
        self._system = options.text("system")
        text = options.text("template")
        self._template = None if text is None else RowTemplate(text, change=self._plain)
        if self._system is not None and not chat:
            raise ValueError("prompt.system: this job leaves prompts as raw text and has no place for it; use job=chat or drop it")
        self._overflow = None if options.on_overflow == "error" else self._cutter(options.on_overflow, max_model_len=max_model_len)

    @property
    def columns(self) -> Sequence[str]:
        """The input columns that a prompt can come from."""
        if self._template is not None:
            return self._template.names
        return ("prompt", self._messages_column, "prompt_token_ids")

    def check(self, names: Sequence[str]) -> None:
        """Refuse an input with columns ``names`` that cannot give one prompt (ValueError naming setting and columns)."""
        listed = ", ".join(repr(name) for name in names) or "none"
        if self._template is not None:
            missing = sorted(set(self._template.required) - set(names))
            if missing:
                raise ValueError(f"prompt.template uses the column {missing[0]!r}, but the input's columns are: {listed}")
        elif not set(self.columns) & set(names):
            wanted = ", ".join(self.columns[:-1]) + f" or {self.columns[-1]}"
            raise ValueError(
                f"input.path: no column gives a prompt; the columns are: {listed}. "
                f"Name one {wanted}, or set prompt.template to Jinja over the columns, in a shell: 'prompt.template=\"{{{{ question }}}}\"'"
            )
        asks_template = (self._chat and (self._template is not None or "prompt" in names)) or (
            self._template is None and self._messages_column in names
        )
        if asks_template and not self.tokenizer.has_chat_template:
            raise ValueError(
                "model.chat_template: this model's tokenizer has no chat template, which chat prompts and messages rows need; "
                "set model.chat_template to one (text or a file), or use job=generate with raw prompts"
            )

    def build(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt | RowError]:
        """Each row's prompt, given its columns, cut where ``on_overflow`` asks for it.

        Or why it has none: ``empty_prompt``, ``bad_row`` or ``template_error``, and ``bad_params`` where the room depends on
        them. Texts are encoded together, which is cheaper than one by one and gives the same ids.
        """
        return [self._fitted(ids, columns) for ids, columns in zip(self._whole(rows), rows, strict=True)]

    def _fitted(self, ids: list[int] | RowError, columns: Mapping[str, Any]) -> Prompt | RowError:
        if isinstance(ids, RowError):
            return ids
        if self._overflow is None:
            return Prompt(ids, is_cut=False)
        try:
            room = self.sampling(columns).max_tokens if self._answers else 0
            fitted = self._overflow.fitted(ids, columns, build=self._whole_of_one, max_tokens=room)
            return Prompt(fitted, is_cut=fitted is not ids)
        except Exception as error:  # whatever a row does to its own handling is that row's error
            return RowError.of(error)

    def _whole_of_one(self, columns: Mapping[str, Any]) -> list[int]:
        (ids,) = self._whole([columns])
        if isinstance(ids, RowError):
            raise ids
        return ids

    def _cutter(self, mode: str, *, max_model_len: int | None) -> Overflow:
        assert max_model_len is not None, "there is nothing to cut prompts for"
        names = None if self._template is not None and self._template.takes_all else self.columns
        messages = self._messages_column if self._template is None else None
        ends = self.tokenizer.token_ends
        return Overflow(mode, columns=names, messages_column=messages, token_ends=ends, max_model_len=max_model_len)

    def _whole(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int] | RowError]:
        drafts = [self._draft(columns) for columns in rows]
        found = [draft if not isinstance(draft, _Text) else [] for draft in drafts]
        for is_raw in (True, False):
            texts = {place: draft.text for place, draft in enumerate(drafts) if isinstance(draft, _Text) and draft.is_raw == is_raw}
            for place, ids in zip(texts, self._encoded(list(texts.values()), is_raw=is_raw), strict=True):
                found[place] = ids
        return found

    def _draft(self, columns: Mapping[str, Any]) -> _Text | list[int] | RowError:
        try:
            return self._prompt(columns)
        except Exception as error:  # whatever a row does to its own handling is that row's error
            return RowError.of(error)

    def _encoded(self, texts: list[str], *, is_raw: bool) -> list[list[int] | RowError]:
        try:
            found = self.tokenizer.encode_batch(texts, add_special_tokens=is_raw) if texts else []
        except Exception as error:  # one of them is no text: half of a surrogate pair, which a template may print
            if len(texts) > 1:
                return [ids for text in texts for ids in self._encoded([text], is_raw=is_raw)]
            return [RowError.of(error) if is_raw else _refused(error)]
        return [ids or _no_tokens() for ids in found]

    def _prompt(self, columns: Mapping[str, Any]) -> _Text | list[int]:
        """Raises RowError, or whatever else the row makes its handling raise."""
        if self._template is not None:
            return self._from_text(self._template.render(columns), columns)
        given = {name: value for name in self.columns if (value := columns.get(name)) is not None}
        if not given:
            raise RowError("empty_prompt", f"{', '.join(self.columns)}: the row fills none of them")
        if len(given) > 1:
            raise RowError("bad_row", f"{' and '.join(given)}: a row may fill one of them only")
        ((name, value),) = given.items()
        if name == "prompt":
            return self._from_text(self._plain(text_of(value, name="prompt")), columns)
        if name == "prompt_token_ids":
            return _checked_ids(value)
        return self._from_chat(_conversation(value, name=self._messages_column, continues=self._continues), columns)

    def sampling(self, columns: Mapping[str, Any]) -> SamplingParams:
        """The job's sampling with the row's ``sampling_params`` (struct or JSON text) over it.

        Raises:
            RowError: ``bad_params``.
        """
        given = columns.get("sampling_params")
        if given is None:
            return self.defaults
        values = _from_json(given, name="sampling_params", code="bad_params")
        if not isinstance(values, Mapping):
            raise RowError("bad_params", f"sampling_params: {given!r} is no struct and no JSON object")
        try:
            return SamplingParams.from_mapping(_without_nulls(values), defaults=self.defaults)
        except (ValueError, RecursionError) as error:
            raise RowError("bad_params", str(error)) from error

    def grammar(self, columns: Mapping[str, Any]) -> Grammar | None:
        """The form of the row's answer: its ``response_format`` (struct or JSON text), else the job's; None leaves it free.

        Raises:
            RowError: ``bad_params``.
        """
        return row_format(columns.get("response_format"), default=self._form)

    def _plain(self, text: str) -> str:
        """A row's text with its control words hidden; a raw prompt that has some may be meant otherwise, which is said once."""
        if self._control_words:
            return text
        hidden = self.tokenizer.hide_control_words(text)
        if hidden != text and not self._chat and not self._warned:
            self._warned = True
            _LOG.warning(
                "a prompt holds control words such as <|im_start|>, which are read as plain text; "
                "where prompts are written in the model's own notation, set prompt.control_words=true"
            )
        return hidden

    def _from_text(self, text: str, columns: Mapping[str, Any]) -> _Text:
        if text == "":
            raise RowError("empty_prompt", "the prompt is an empty text")
        if self._chat:
            return self._from_chat([{"role": "user", "content": text}], columns)
        return _Text(text, is_raw=True)

    def _from_chat(self, messages: list[Message], columns: Mapping[str, Any]) -> _Text:
        if self._system is not None and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        tools = columns.get("tools")
        if tools is not None:
            tools = _from_json(tools, name="tools", code="bad_row")
            if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
                raise RowError("bad_row", "tools: not a list of tool descriptions")
        continues = messages[-1]["role"] == "assistant"
        try:
            text = self.tokenizer.chat_text(
                messages,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                control_words=self._control_words,
                tools=tools or None,
            )
        except Exception as error:  # a model's template may raise anything; its words are for the row's author
            raise _refused(error) from error
        return _Text(text, is_raw=False)


def _from_json(value: Any, *, name: str, code: Any) -> Any:
    if not isinstance(value, (str, bytes)):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(code, f"{name}: the text is no JSON: {error}") from error


def _without_nulls(value: Any) -> Any:
    """Arrow gives every row all keys of a struct, null where the row lacks one."""
    return {key: _without_nulls(item) for key, item in value.items() if item is not None} if isinstance(value, Mapping) else value


def _no_tokens() -> RowError:
    return RowError("empty_prompt", "the prompt has no tokens")


def _refused(error: Exception) -> RowError:
    return RowError("template_error", f"the chat template refused the row: {error}")


def _checked_ids(value: Any) -> list[int]:
    whole = isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)
    if not whole:
        raise RowError("bad_row", "prompt_token_ids: not a list of token ids (whole numbers from 0 up)")
    if not value:
        raise _no_tokens()
    return list(value)


def _conversation(value: Any, *, name: str, continues: bool) -> list[Message]:
    """A checked copy of a row's messages: keys that are null are left out, a list of text parts is joined.

    Null content is allowed only beside ``tool_calls`` and becomes an empty text.
    """
    items = _from_json(value, name=name, code="bad_row")
    if not isinstance(items, list):
        raise RowError("bad_row", f"{name}: not a list of messages")
    if not items:
        raise RowError("empty_prompt", f"{name}: the list is empty")
    messages = [_message(item, name=f"{name}[{position}]") for position, item in enumerate(items)]
    if all(message["role"] == "system" for message in messages):
        raise RowError("bad_row", f"{name}: there is a system message only; add the user's")
    if messages[-1]["role"] == "assistant" and not continues:
        raise RowError(
            "bad_row",
            f"{name}: the last message is the assistant's own, so there is nothing to answer; "
            "set prompt.continue_final_message=true to go on from its end",
        )
    return messages


def _message(item: Any, *, name: str) -> Message:
    if not isinstance(item, Mapping):
        raise RowError("bad_row", f"{name}: {item!r} is no message with role and content")
    message = {key: value for key, value in item.items() if value is not None}
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RowError("bad_row", f"{name}.role: missing or no text")
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        content = ""
    elif isinstance(content, list):
        content = "".join(_part(part, name=f"{name}.content") for part in content)
    elif content is None:
        raise RowError("bad_row", f"{name}.content: missing or null")
    return message | {"content": text_of(content, name=f"{name}.content")}


def _part(part: Any, *, name: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind != "text":
        raise RowError("bad_row", f"{name}: a part of type {kind!r} is not served; only text parts are")
    return text_of(part.get("text"), name=f"{name}.text")
