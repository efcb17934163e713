"""Text to token ids and back: the model's tokenizer.json, its chat template, and decoding as tokens arrive.

Knows nothing of weights or requests. It runs on the tokenizers library alone: importing transformers takes seconds.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from engine.chat_template import ChatTemplate, ChatTemplateError, map_strings
from engine.config import ModelConfig
from engine.weights.checkpoint import checkpoint_folder, end_token_ids, read_json, tokenizer_folder

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PRIVATE_USE = 0xF0000  # supplementary private-use area: characters that no text has a meaning for, 65,534 of them


class TokenizerMissing(ValueError):
    """The model comes without a tokenizer."""


class Tokenizer:
    """One model's vocabulary. ``vocab_size`` is the highest id + 1: ids from there on mean nothing.

    ``eos_token_ids`` are the ids that end an answer: those of generation_config.json (else of config.json), and the
    tokenizer's own end token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """``special_tokens`` maps bos_token, eos_token, ... to their text, as templates see them."""
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = None if chat_template is None else ChatTemplate(chat_template, variables=special_tokens)
        self._added = backend.get_added_tokens_decoder()
        self._control = _ControlWords([token.content for token in self._added.values()])
        own_ids = {name: id_ for name, text in special_tokens.items() if (id_ := backend.token_to_id(text)) is not None}
        self.bos_token_id = own_ids.get("bos_token")
        own_end = [own_ids["eos_token"]] if "eos_token" in own_ids else []
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *own_end]))
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=False), *(id_ + 1 for id_ in self._added)])

    @classmethod
    def load(cls, config: ModelConfig) -> Tokenizer:
        """The tokenizer at ``model.tokenizer``, else the model's own.

        Raises:
            ValueError: there is none in the tokenizers library's format, or the template does not compile.
        """
        model = checkpoint_folder(config, weights=False)
        folder = model if config.tokenizer is None else tokenizer_folder(config.tokenizer)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerMissing(
                f"model.tokenizer: {folder} has no tokenizer.json; name a folder or hub id that has one "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes it)"
            )
        settings_file = folder / "tokenizer_config.json"
        settings = read_json(settings_file, key="model.tokenizer") if settings_file.is_file() else {}
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more exact
            raise ValueError(f"model.tokenizer: {file} is no file of the tokenizers library: {error}") from error
        return cls(
            backend,
            special_tokens=_special_tokens(settings),
            chat_template=_template_text(config, folder, settings),
            eos_token_ids=end_token_ids(model),
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def template_hash(self) -> str | None:
        """sha256 of the chat template's text, in hex."""
        return None if self._template is None else self._template.hash

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Token ids of raw text.

        Control words count as control tokens, so that a conversation rendered elsewhere gives the ids that it should;
        ``split_special_tokens`` keeps them plain text, and so does ``hide_control_words`` for a piece of the text. With
        ``add_special_tokens`` the tokenizer adds what it always adds, but never a second BOS to a text that brings its own.
        """
        if split_special_tokens:
            text = self.hide_control_words(text)
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """``encode`` for many texts, in one thread that lets other Python threads run meanwhile."""
        found = _ids(self._backend, texts, add_special_tokens=add_special_tokens)
        hidden = [place for place, text in enumerate(texts) if self._control.has_hidden(text)]
        if hidden:
            revealed = [self._control.reveal(texts[place]) for place in hidden]
            for place, ids in zip(hidden, _ids(self._literal, revealed, add_special_tokens=add_special_tokens), strict=True):
                found[place] = ids
        if add_special_tokens and self.bos_token_id is not None:
            doubled = [self.bos_token_id] * 2
            return [ids[1:] if ids[:2] == doubled else ids for ids in found]
        return found

    def hide_control_words(self, text: str) -> str:
        """``text`` for use in a larger one that is encoded later: the control words in it will be plain text there."""
        return self._control.hide(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation: its ``chat_text``, which ``options`` are those of, encoded.

        They are equal to those of transformers' apply_chat_template.
        """
        return self.encode_batch([self.chat_text(messages, **options)], add_special_tokens=False)[0]

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        control_words: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation through the chat template, as text for ``encode_batch`` without ``add_special_tokens``.

        The template alone makes control tokens. A control word inside a message or a tool stays plain text, except that
        an assistant message may hold the model's own markup, the added tokens that are not special (such as <think>);
        with ``control_words`` all of them are control tokens.
        With ``continue_final_message`` the text ends with the last message's, its trailing blanks included.

        Raises:
            ValueError: the model has no chat template.
            ChatTemplateError: the template refuses the messages.
        """
        if self._template is None:
            raise ValueError("model.chat_template: the model has no chat template, which messages need; give one (text or a file)")
        hidden = [dict(message) if control_words else self._hide(message) for message in messages]
        if continue_final_message:
            if not hidden or not isinstance(hidden[-1].get("content"), str):
                raise ChatTemplateError("there is no last message with text to continue")
            hidden[-1] |= {"content": hidden[-1]["content"] + self._control.end}
        text = self._template.render(
            hidden,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            tools=tools if tools is None or control_words else map_strings(tools, self._control.hide),
            variables=template_kwargs,
        )
        if continue_final_message:
            text, found, _ = text.rpartition(self._control.end)
            if not found:
                raise ChatTemplateError("the template does not print the last message, so it cannot be continued")
        return text

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``, blanks exactly as the tokens have them; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_ends(self, text: str) -> list[int]:
        """For each token of ``text``, as it is encoded alone, the place in it just behind the token.

        Of several tokens that make up one character each ends behind it.
        """
        return [end for _, end in self._backend.encode(text, add_special_tokens=False).offsets]

    def incremental_decoder(self, *, skip_special_tokens: bool = True) -> IncrementalDecoder:
        return IncrementalDecoder(self, skip_special_tokens=skip_special_tokens)

    def to_json(self) -> str:
        """The content of its tokenizer.json."""
        return str(self._backend.to_str())

    def control_token_id(self, text: str) -> int | None:
        """The id of the control word that ``text`` is; None where it is ordinary text."""
        return next((id_ for id_, token in self._added.items() if token.content == text and token.special), None)

    def _hide(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with the control words in it hidden; its role is the template's to read."""
        role = message.get("role")
        keep = {token.content for token in self._added.values() if not token.special} if role == "assistant" else set()
        hidden: dict[str, Any] = map_strings(message, lambda text: self._control.hide(text, keep=keep))
        return hidden | {"role": role}

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The same vocabulary with every control word renamed to its mark: typed control words are plain text to it."""
        content = json.loads(self._backend.to_str())
        for token in content["added_tokens"]:
            token["content"] = self._control.mark[token["content"]]
        model = content["model"]
        rename = self._control.mark.get
        if isinstance(model["vocab"], dict):
            model["vocab"] = {rename(token, token): id_ for token, id_ in model["vocab"].items()}
        else:
            model["vocab"] = [[rename(token, token), score] for token, score in model["vocab"]]
        if model.get("unk_token") is not None:
            model["unk_token"] = rename(model["unk_token"], model["unk_token"])
        return tokenizers.Tokenizer.from_str(json.dumps(content))


class _ControlWords:
    """Tells control words that a template printed from those that came in with a message.

    Before rendering, words in messages are hidden: each becomes a few private-use characters that begin with a random
    key, which no template looks into and no text can guess. After it, a word still in sight is the template's.
    """

    def __init__(self, words: Sequence[str]) -> None:
        assert len(words) < 0xFFFE
        key = [chr(_PRIVATE_USE + secrets.randbelow(0xFFFE)) for _ in range(8)]
        hide, mark = "".join(key[:4]), "".join(key[4:])
        self._hidden = {word: hide + chr(_PRIVATE_USE + index) for index, word in enumerate(words)}
        self._words = {hidden: word for word, hidden in self._hidden.items()}
        self.mark = {word: mark + chr(_PRIVATE_USE + index) for index, word in enumerate(words)}
        self.end = hide + chr(_PRIVATE_USE + 0xFFFD)
        longest_first = sorted(words, key=len, reverse=True)
        self._in_sight = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._out_of_sight = re.compile(f"{hide}.")
        self._hide_key = hide

    def hide(self, text: str, *, keep: set[str] | frozenset[str] = frozenset()) -> str:
        return self._in_sight.sub(lambda found: found[0] if found[0] in keep else self._hidden[found[0]], text)

    def has_hidden(self, text: str) -> bool:
        return self._hide_key in text

    def reveal(self, text: str) -> str:
        """Marks for the template's control words, and the messages' own words back in place."""
        marked = self._in_sight.sub(lambda found: self.mark[found[0]], text)
        return self._out_of_sight.sub(lambda found: self._words[found[0]], marked)


class IncrementalDecoder:
    """Decodes one answer as its tokens arrive; ``text`` never ends inside a character.

    After ``finish`` the text equals ``Tokenizer.decode`` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []  # the last ids that gave text: blanks between tokens depend on what stands before
        self._pending: list[int] = []
        self.text = ""

    def add(self, token_id: int) -> str:
        """Take one more token; returns the text that is now certain, often empty."""
        self._pending.append(token_id)
        new = self._new_text()
        return "" if new.endswith("\ufffd") else self._settle(new)

    def finish(self) -> str:
        """No token will follow: returns what was held back, with U+FFFD for a character that was cut."""
        return self._settle(self._new_text())

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip)
        return self._tokenizer.decode(self._context + self._pending, skip_special_tokens=self._skip)[len(before) :]

    def _settle(self, new: str) -> str:
        if new:
            self._context, self._pending = self._pending, []
            self.text += new
        return new


def _ids(backend: tokenizers.Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text; the files write a token as its text or as a dict with ``content``."""
    found = {name: settings[name] for name in _SPECIAL_NAMES if settings.get(name) is not None}
    texts: dict[str, Any] = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"model.tokenizer: tokenizer_config.json has {name}={found[name]!r}, which is no token's text")
    return texts


def _template_text(config: ModelConfig, folder: Path, settings: Mapping[str, Any]) -> str | None:
    """``model.chat_template`` (Jinja, or a file of it), else chat_template.jinja, else the one in tokenizer_config.json."""
    own = config.chat_template
    if own is not None and ("{{" in own or "{%" in own):
        return own
    if own is not None and not Path(own).expanduser().is_file():
        raise ValueError(f"model.chat_template: {own!r} is neither a file nor Jinja text")
    file = folder / "chat_template.jinja" if own is None else Path(own).expanduser()
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found
