"""Prompts that are too long: what is cut, what stays, and that nothing is cut for nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from engine import SamplingParams, Tokenizer
from pipeline import PromptOptions, Prompts, RowError
from pipeline.prompt import Prompt

MODES = ("truncate_left", "truncate_right", "truncate_middle")
LIMIT = 40


@pytest.fixture
def prompts(tokenizer) -> Callable[..., Prompts]:
    """Prompts of at most ``limit`` bytes beside an answer of 10."""

    def build(*, limit: int = LIMIT, chat: bool = False, answers: bool = True, **options: Any) -> Prompts:
        sampling = SamplingParams(max_tokens=10)
        return Prompts(tokenizer, options=PromptOptions(**options), sampling=sampling, chat=chat, answers=answers, max_model_len=limit + 10)

    return build


def ids(made: Prompts, columns: dict[str, Any]) -> list[int]:
    return prompt(made, columns).token_ids


def prompt(made: Prompts, columns: dict[str, Any]) -> Prompt:
    (found,) = made.build([columns])
    if isinstance(found, RowError):
        raise found
    return found


def cut(items: Any, mode: str, num_kept: int) -> Any:
    """The definition, on any slice of tokens or of text with a byte a character."""
    if mode == "truncate_left":
        return items[len(items) - num_kept :]
    if mode == "truncate_right":
        return items[:num_kept]
    return items[: -(-num_kept // 2)] + items[len(items) - num_kept // 2 :]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, LIMIT, LIMIT + 1, 100])
def test_a_raw_prompt_and_ids_keep_as_many_tokens_as_fit(prompts, mode: str, length: int) -> None:
    text = ("the quick brown fox jumps over " * 4)[:length]
    expected = text if length <= LIMIT else cut(text, mode, LIMIT)
    made = prompts(on_overflow=mode)
    assert bytes(ids(made, {"prompt": text})).decode() == expected
    assert ids(made, {"prompt_token_ids": list(range(1, length + 1))}) == (
        list(range(1, length + 1)) if length <= LIMIT else cut(list(range(1, length + 1)), mode, LIMIT)
    )
    assert prompt(made, {"prompt": text}).is_cut == (length > LIMIT)


@pytest.mark.parametrize("mode", MODES)
def test_system_prompt_and_turns_stay_and_the_longest_message_is_cut(prompts, mode: str) -> None:
    messages = [
        {"role": "system", "content": "S" * 50},
        {"role": "user", "content": "abcdefghij" * 3},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "why?"},
    ]
    whole = f"[system] {'S' * 50}\n[user] {{}}\n[assistant] so\n[user] why?\n[assistant] "
    made = prompts(limit=len(whole.format("")) + 7, chat=True, on_overflow=mode)
    expected = whole.format(cut("abcdefghij" * 3, mode, 7))
    assert bytes(ids(made, {"messages": messages})).decode() == expected
    assert bytes(ids(made, {"messages": json.dumps(messages)})).decode() == expected
    parts = [{"type": "text", "text": "abcdefghij" * 3}]
    assert bytes(ids(made, {"messages": [messages[0], {"role": "user", "content": parts}, *messages[2:]]})).decode() == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("template", ["Q: {{ question }} C: {{ context }}", "Q: {{ row['question'] }} C: {{ row.context }}"])
def test_of_a_template_the_longest_column_is_cut_and_its_own_words_stay(prompts, mode: str, template: str) -> None:
    columns = {"question": "why?", "context": "0123456789" * 5, "unused": "x" * 500, "number": 3}
    text = bytes(ids(prompts(template=template, on_overflow=mode), columns)).decode()
    assert text == "Q: why? C: " + cut(columns["context"], mode, LIMIT - len("Q: why? C: "))


def test_texts_inside_a_column_are_cut_the_longest_first(prompts) -> None:
    template = "{% for d in docs %}{{ d.title }}: {{ d.text }};{% endfor %}"
    docs = [{"title": "A", "text": "a" * 30}, {"title": "B", "text": "b" * 50}]
    assert bytes(ids(prompts(template=template, on_overflow="truncate_right"), {"docs": docs})).decode() == f"A: {'a' * 30};B: bb;"
    docs.append({"title": "C", "text": "c" * 15})
    text = bytes(ids(prompts(template=template, on_overflow="truncate_right"), {"docs": docs})).decode()
    assert text == f"A: {'a' * 12};B: b;C: {'c' * 15};" and len(text) == LIMIT


def test_a_text_that_is_printed_in_part_or_twice_is_cut_too(prompts) -> None:
    made = prompts(template="{{ a[:60] }}", on_overflow="truncate_right")
    assert LIMIT - 8 <= len(ids(made, {"a": "x" * 500})) <= LIMIT
    made = prompts(template="{{ a }} {{ a }}", on_overflow="truncate_left")
    assert LIMIT - 8 <= len(ids(made, {"a": "y" * 100})) <= LIMIT


def test_what_is_too_long_without_the_rows_texts_stays_as_it_is(prompts) -> None:
    made = prompts(chat=True, system="S" * 60, on_overflow="truncate_left")
    assert bytes(ids(made, {"prompt": "hello"})).decode().endswith("[user] hello\n[assistant] ")
    assert not prompt(made, {"prompt": "hello"}).is_cut


def test_a_rows_settings_stay_whole(prompts) -> None:
    sampling = '{"max_tokens": 10}' + " " * 700
    columns = {"text": "x" * 500, "other": "", "tools": json.dumps([{"name": "t" * 600}]), "sampling_params": sampling}
    made = prompts(chat=True, limit=1000, template="{{ text }}{{ row.other }}", on_overflow="truncate_left")
    assert bytes(ids(made, columns)).decode().startswith(columns["tools"])


def test_a_text_that_must_not_be_cut_is_left_and_the_next_one_is(prompts) -> None:
    made = prompts(template="{% if code|length != 60 %}{{ broken }}{% endif %}{{ text }}", on_overflow="truncate_right")
    assert bytes(ids(made, {"code": "c" * 60, "text": "x" * 50})).decode() == "x" * LIMIT
    made = prompts(template="{% if text|length != 60 %}{{ broken }}{% endif %}{{ text }}", on_overflow="truncate_right")
    assert bytes(ids(made, {"text": "x" * 60})).decode() == "x" * 60


def test_the_room_for_the_answer_is_the_rows_own(prompts) -> None:
    made = prompts(on_overflow="truncate_left")
    row = {"prompt": "x" * 100}
    assert len(ids(made, row)) == LIMIT
    assert len(ids(made, row | {"sampling_params": {"max_tokens": 20}})) == LIMIT - 10
    assert len(ids(made, row | {"sampling_params": {"max_tokens": LIMIT + 10}})) == LIMIT + 9, "they alone are more: one token"
    assert len(ids(prompts(on_overflow="truncate_left", answers=False), row)) == LIMIT + 10


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt\.on_overflow: 'left' is not one of error, truncate_left"):
        PromptOptions(on_overflow="left")


TEXTS = st.text(alphabet="ab c\n.é漢🌶<|im_end|>", min_size=0, max_size=400)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, mode=st.sampled_from(MODES), room=st.integers(30, 200))
def test_a_real_tokenizers_prompt_fits_with_its_frame_whole_and_little_is_lost(
    embedded_tokenizer: Tokenizer, text: str, mode: str, room: int
) -> None:
    def built(content: str, **options: Any) -> list[int]:
        made = Prompts(
            embedded_tokenizer,
            options=PromptOptions(system="Be brief.", **options),
            sampling=SamplingParams(max_tokens=5),
            chat=True,
            max_model_len=room + 5,
        )
        return ids(made, {"prompt": content})

    if not text:
        return
    whole, found = built(text), built(text, on_overflow=mode)
    if len(whole) <= room:
        assert found == whole
        return
    assert room - 8 <= len(found) <= room, "a character that several tokens make up, or a merge, may cost a few more"
    shown = embedded_tokenizer.decode(found, skip_special_tokens=False)
    start, end = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert shown.startswith(start) and shown.endswith(end)
    kept = shown[len(start) : -len(end)]
    if mode == "truncate_left":
        assert text.endswith(kept)
    elif mode == "truncate_right":
        assert text.startswith(kept)
    else:
        assert any(text.startswith(kept[:place]) and text.endswith(kept[place:]) for place in range(len(kept) + 1))


def test_places_of_tokens_are_those_of_the_text(embedded_tokenizer: Tokenizer) -> None:
    text = "One 🌶️ two"
    ends = embedded_tokenizer.token_ends(text)
    assert len(ends) == len(embedded_tokenizer.encode(text, add_special_tokens=False))
    assert ends == sorted(ends) and ends[-1] == len(text)
