"""Rows to token ids: which text the model reads, and which rows are refused with which code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine import SamplingParams
from pipeline import PromptOptions, Prompts, RowError


@pytest.fixture
def prompt_text(tokenizer):
    """The text that the model would read for a row's columns."""

    def build(columns: dict[str, Any], *, chat: bool = False, **options: Any) -> str:
        prompts = Prompts(tokenizer, options=PromptOptions(**options), sampling=SamplingParams(), chat=chat)
        [found] = prompts.build([columns])
        if isinstance(found, RowError):
            raise found
        return bytes(found.token_ids).decode()

    return build


USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Hello"}


def test_generate_leaves_text_raw_and_chat_makes_a_user_message(prompt_text) -> None:
    assert prompt_text({"prompt": " a ${b} {{ c }} "}) == " a ${b} {{ c }} "
    assert prompt_text({"prompt": "Hi"}, chat=True) == "[user] Hi\n[assistant] "
    assert prompt_text({"prompt": "Hi"}, chat=True, system="Be brief.") == "[system] Be brief.\n[user] Hi\n[assistant] "


def test_messages_always_go_through_the_template_and_ids_never(prompt_text) -> None:
    for chat in (False, True):
        assert prompt_text({"messages": [SYSTEM, USER]}, chat=chat) == "[system] Be brief.\n[user] Hi\n[assistant] "
        assert prompt_text({"prompt_token_ids": [72, 105], "prompt": None}, chat=chat) == "Hi"


def test_a_prompt_and_its_one_message_have_equal_ids(prompt_text) -> None:
    assert prompt_text({"prompt": "Hi"}, chat=True, system="S") == prompt_text({"messages": [USER]}, chat=True, system="S")


def test_the_system_prompt_goes_before_conversations_without_one(prompt_text) -> None:
    assert prompt_text({"messages": [USER, ASSISTANT, USER]}, chat=True, system="S").startswith("[system] S\n[user] Hi\n")
    assert prompt_text({"messages": [SYSTEM, USER]}, chat=True, system="S") == "[system] Be brief.\n[user] Hi\n[assistant] "


def test_texts_come_from_files_too(prompt_text, tmp_path) -> None:
    (tmp_path / "system.txt").write_text("Sei kurz: ${x}, {{ y }}.", encoding="utf-8")
    (tmp_path / "template.txt").write_text("Q: {{ question }}\n", encoding="utf-8")
    text = prompt_text(
        {"question": "why?"}, chat=True, system_file=str(tmp_path / "system.txt"), template_file=str(tmp_path / "template.txt")
    )
    assert text == "[system] Sei kurz: ${x}, {{ y }}.\n[user] Q: why?\n[assistant] "
    with pytest.raises(ValueError, match=r"prompt\.system_file: cannot read"):
        prompt_text({"prompt": "a"}, system_file=str(tmp_path / "missing.txt"))
    with pytest.raises(ValueError, match=r"prompt\.system and prompt\.system_file"):
        prompt_text({"prompt": "a"}, system="a", system_file="b")


def test_content_may_be_text_parts_or_a_tool_call_but_never_the_word_none(prompt_text) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two", "image_url": None}]}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}], "name": None}
    tool = {"role": "tool", "content": "12C", "tool_call_id": "c1"}
    assert prompt_text({"messages": [parts]}) == "[user] one two\n[assistant] "
    assert prompt_text({"messages": [USER, call, tool]}) == "[user] Hi\n[assistant] \n[tool] 12C\n[assistant] "


def test_messages_and_tools_may_be_json_text_and_text_may_be_bytes(prompt_text) -> None:
    assert prompt_text({"messages": json.dumps([USER])}) == prompt_text({"messages": [USER]})
    assert prompt_text({"turns": [USER]}, messages_column="turns") == prompt_text({"messages": [USER]})
    assert prompt_text({"prompt": "ä".encode()}) == "ä"
    tools = [{"type": "function"}]
    assert prompt_text({"messages": [USER], "tools": tools}) == '[{"type": "function"}]\n[user] Hi\n[assistant] '
    assert prompt_text({"messages": [USER], "tools": json.dumps(tools)}) == prompt_text({"messages": [USER], "tools": tools})


@pytest.mark.parametrize(
    ("columns", "code", "words"),
    [
        ({}, "empty_prompt", "none of them"),
        ({"prompt": None, "messages": None}, "empty_prompt", "none of them"),
        ({"prompt": ""}, "empty_prompt", "empty text"),
        ({"messages": []}, "empty_prompt", "list is empty"),
        ({"prompt_token_ids": []}, "empty_prompt", "no tokens"),
        ({"prompt": "a", "messages": [USER]}, "bad_row", "prompt and messages"),
        ({"prompt": 42}, "bad_row", "prompt: 42 is no text"),
        ({"prompt": b"\xff"}, "bad_row", "no UTF-8"),
        ({"prompt_token_ids": [1, -1]}, "bad_row", "token ids"),
        ({"prompt_token_ids": [1, True]}, "bad_row", "token ids"),
        ({"prompt_token_ids": "12"}, "bad_row", "token ids"),
        ({"messages": "{"}, "bad_row", "no JSON"),
        ({"messages": {"role": "user"}}, "bad_row", "not a list"),
        ({"messages": [None, USER]}, "bad_row", r"messages\[0\]"),
        ({"messages": [USER, {"content": "x"}]}, "bad_row", r"messages\[1\].role"),
        ({"messages": [{"role": "user"}]}, "bad_row", r"messages\[0\].content: missing or null"),
        ({"messages": [{"role": "user", "content": None}]}, "bad_row", "missing or null"),
        ({"messages": [{"role": "assistant", "content": None}]}, "bad_row", "missing or null"),
        ({"messages": [{"role": "user", "content": 42}]}, "bad_row", "42 is no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "bad_row", "image_url"),
        ({"messages": [SYSTEM]}, "bad_row", "system message only"),
        ({"messages": [USER, ASSISTANT]}, "bad_row", "nothing to answer"),
        ({"messages": [USER], "tools": [1]}, "bad_row", "tools"),
        ({"messages": [{"role": "user", "content": "template, refuse"}]}, "template_error", "no such words here"),
    ],
)
def test_rows_that_cannot_be_asked(prompt_text, columns: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(RowError, match=words) as caught:
        prompt_text(columns)
    assert caught.value.code == code


def test_a_conversation_goes_on_from_the_assistant_s_message_only_when_told(prompt_text) -> None:
    for text in ("It is ", "It is\n", " It is"):
        messages = [USER, {"role": "assistant", "content": text}]
        with pytest.raises(RowError, match=r"prompt\.continue_final_message"):
            prompt_text({"messages": messages})
        assert prompt_text({"messages": messages}, continue_final_message=True) == f"[user] Hi\n[assistant] {text}"
    assert prompt_text({"messages": [USER]}, continue_final_message=True) == "[user] Hi\n[assistant] "


def test_a_template_sees_the_columns(prompt_text) -> None:
    columns = {"question": "why?", "n": 3, "tags": ["a", "b"], "odd name": "x", "blob": "ü".encode()}
    assert prompt_text(columns, template="{{ question }} {{ n + 1 }} {{ tags | join('-') }}") == "why? 4 a-b"
    assert prompt_text(columns, template="{{ row['odd name'] }}{{ blob }}") == "xü"
    assert prompt_text(columns, template="{% for tag in tags %}[{{ tag }}]{% endfor %}") == "[a][b]"
    assert prompt_text({"a": None}, template="x{{ a or '' }}") == "x"
    assert prompt_text({"range": "1-5"}, template="{{ range }}") == "1-5", "a column goes before Jinja's own name"
    assert prompt_text({}, template="{% for i in range(2) %}{{ i }}{% endfor %}") == "01"
    assert prompt_text({"prompt": "p", "messages": [USER]}, template="<{{ prompt }}>", chat=True) == "[user] <p>\n[assistant] "


def test_row_text_is_never_a_template(prompt_text) -> None:
    assert prompt_text({"a": "{{ 1 + 1 }} ${b} {% raw %}"}, template="{{ a }}") == "{{ 1 + 1 }} ${b} {% raw %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ a }}", "prints a null"),
        ("{{ missing }}", "'missing' is undefined"),
        ("{{ row.missing }}", "missing"),
        ("{{ b.c.d }}", "c"),
        ("{{ b + 1 }}", "unsupported operand|can only concatenate|must be str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ b.__init__ }}", "unsafe"),
        ("{{ b * 10**17 }}", "MemoryError"),
    ],
)
def test_a_template_that_fails_is_an_error_row(prompt_text, template: str, words: str) -> None:
    with pytest.raises(RowError, match=words) as caught:
        prompt_text({"a": None, "b": "text"}, template=template)
    assert caught.value.code == "template_error"


def test_a_template_with_nothing_in_it_is_an_empty_prompt(prompt_text) -> None:
    with pytest.raises(RowError, match="empty text"):
        prompt_text({"a": ""}, template="{{ a }}", chat=True)


@pytest.fixture
def check(tokenizer):
    def build(names: list[str], *, chat: bool = True, **options: Any) -> None:
        Prompts(tokenizer, options=PromptOptions(**options), sampling=SamplingParams(), chat=chat).check(names)

    return build


def test_what_can_never_work_is_refused_before_a_model_is_there(check, tokenizer) -> None:
    check(["prompt"])
    check(["question"], template="{{ question }}")
    check(["question"], template="{{ context | default('') }}{% if hint is defined %}{{ hint }}{% endif %}{{ question }}")
    with pytest.raises(ValueError, match=r"no column gives a prompt.*'text'.*prompt\.template"):
        check(["text"])
    with pytest.raises(ValueError, match=r"prompt\.template uses the column 'questoin'"):
        check(["question"], template="{{ questoin }}")
    with pytest.raises(ValueError, match=r"prompt\.template: line 1"):
        check(["a"], template="{{ a")
    with pytest.raises(ValueError, match=r"prompt\.system: this job"):
        check(["prompt"], chat=False, system="S")
    tokenizer.has_chat_template = False
    for names in (["prompt"], ["messages"]):
        with pytest.raises(ValueError, match=r"model\.chat_template"):
            check(names)
    check(["prompt"], chat=False)
    check(["prompt_token_ids"])


def test_a_row_has_its_sampling_over_the_job_s(tokenizer) -> None:
    job = SamplingParams(temperature=0.0, max_tokens=8)
    prompts = Prompts(tokenizer, options=PromptOptions(), sampling=job, chat=True)
    assert prompts.sampling({}) == prompts.sampling({"sampling_params": None}) == job
    given = {"temperature": 0.5, "seed": 7, "top_k": None, "temprature": None}
    expected = SamplingParams(temperature=0.5, seed=7, max_tokens=8)
    assert prompts.sampling({"sampling_params": given}) == prompts.sampling({"sampling_params": json.dumps(given)}) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"stop": ["END", "\n"], "logit_bias": {"42": -5}, "bad_words": ["no"], "logprob_token_ids": [3], "allowed_token_ids": [1, 2]},
        {
            "stop": ["END", "\n"],
            "logit_bias": {"42": -5, "7": None},
            "bad_words": ["no"],
            "logprob_token_ids": [3],
            "allowed_token_ids": [1, 2],
        },
    ],
)
def test_a_row_may_bring_lists_and_mappings(tokenizer, given: dict[str, Any]) -> None:
    prompts = Prompts(tokenizer, options=PromptOptions(), sampling=SamplingParams(), chat=True)
    expected = SamplingParams(
        stop=("END", "\n"), logit_bias={42: -5.0}, bad_words=("no",), logprob_token_ids=(3,), allowed_token_ids=(1, 2)
    )
    for value in (given, json.dumps(given)):
        assert prompts.sampling({"sampling_params": value}) == expected


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"sampling_params": {"temprature": 1}}, "temprature"),
        ({"sampling_params": {"top_p": 0}}, r"sampling\.top_p"),
        ({"sampling_params": {"max_tokens": "9"}}, r"sampling\.max_tokens"),
        ({"sampling_params": {"stop": [""]}}, r"sampling\.stop: an empty text"),
        ({"sampling_params": {"logit_bias": {"a": 1}}}, r"sampling\.logit_bias"),
        ({"sampling_params": "{"}, "no JSON"),
        ({"sampling_params": "[]"}, "no JSON object"),
        ({"sampling_params": '{"a": ' * 100_000}, "recursion"),
        ({"sampling_params": '{"a": ' * 900 + "1" + "}" * 900}, "recursion|unknown key"),
    ],
)
def test_bad_row_sampling(tokenizer, columns: dict[str, Any], words: str) -> None:
    prompts = Prompts(tokenizer, options=PromptOptions(), sampling=SamplingParams(), chat=True)
    with pytest.raises(RowError, match=words) as caught:
        prompts.sampling(columns)
    assert caught.value.code == "bad_params"
