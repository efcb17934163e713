"""What an answer's text is and what ends it, with the embedded model's tokenizer and a model that writes a given text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from engine.rules import Rules
from engine.sampling_params import SamplingParams

END = 2  # <|im_end|>
TEXTS = [
    "Warm 🌶️ soup, cold 🧊 tea and 👨‍👩‍👧 at the table!",
    "Žluťoučký kůň pěl",
    "今日はとても暑い。",
    "मैं घर जा रहा हूँ",
    "กินข้าวหรือยัง",
    "𒀀𒁀 and 𠮷野家",
    "the sign said 'closed' , did n't it ?",
    "if a != b and c . d == e :",
    '{"k": [1, 2], "t": \'x\'}',
    "  two blanks before, and a tab\tinside\n",
    " one blank",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", [[], ["a text that never comes"]])
def test_the_text_is_what_the_model_wrote(forced, text, stop):
    done = forced(text, stop=stop)
    assert (done.text, done.finish_reason, done.stop_reason) == (text, "stop", END)
    assert done.token_ids[-1] == END


@pytest.mark.parametrize("text", TEXTS)
def test_a_cut_answer_has_all_that_was_written(forced, embedded_tokenizer, text):
    """Wherever it is cut, inside a character too, and whether or not something was held back for a stop text."""
    ids = embedded_tokenizer.encode(text)
    for length in range(1, len(ids) + 1):
        plain = forced(text, max_tokens=length)
        watched = forced(text, max_tokens=length, stop=[text + " and more"])
        assert plain.text == watched.text == embedded_tokenizer.decode(ids[:length])
        assert (plain.finish_reason, plain.stop_reason) == ("length", None)
        plain.text.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "stop", "expected", "reason"),
    [
        ("We met in Lisbon.", ["Lisb"], "We met in ", "Lisb"),
        ("a quick brown fox jumps", ["ck bro"], "a qui", "ck bro"),
        ("bonjour tout le monde", ["bo"], "", "bo"),
        ("first\n\nsecond", ["\n\n"], "first", "\n\n"),
        ("is 🌶️ hot", ["🌶"], "is ", "🌶"),
        ("mnopqr", ["opqr", "no"], "m", "no"),
        ("mnopqr", ["zzz", "q"], "mnop", "q"),
        ("yes Yes YES", ["YES"], "yes Yes ", "YES"),
    ],
)
def test_a_stop_text_ends_wherever_token_borders_fall(forced, text, stop, expected, reason):
    done = forced(text, stop=stop)
    assert (done.text, done.finish_reason, done.stop_reason) == (expected, "stop", reason)


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="ab \n.é漢🌶", min_size=1, max_size=30), data=st.data())
def test_nothing_of_a_stop_text_is_left(forced, text, data):
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    done = forced(text, stop=[stop])
    assert (done.text, done.stop_reason) == (text[: text.find(stop)], stop)
    kept = forced(text, stop=[stop], include_stop_str_in_output=True)
    assert kept.text == text[: text.find(stop) + len(stop)]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_control_word_may_be_a_stop_text(forced, skip, include):
    settings = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
    done = forced("over<|im_start|>and out", stop=["<|im_start|>"], **settings)
    assert (done.text, done.finish_reason, done.stop_reason) == ("over" + "<|im_start|>" * include, "stop", "<|im_start|>")
    ended = forced("over<|im_end|>and out", stop=["<|im_end|>"], ignore_eos=True, **settings)
    assert (ended.text, ended.stop_reason) == ("over" + "<|im_end|>" * include, "<|im_end|>")


def test_control_words_are_left_out_of_the_text_unless_wanted(forced):
    assert forced("a<|im_start|>b").text == "ab"
    assert forced("a<|im_start|>b", skip_special_tokens=False).text == "a<|im_start|>b"


def test_a_stop_token_is_not_in_the_text(forced, embedded_tokenizer):
    ids = embedded_tokenizer.encode("one two three")
    done = forced(ids, stop_token_ids=[ids[-1]])
    assert (done.text, done.stop_reason, done.token_ids) == ("one two", ids[-1], tuple(ids))


def test_an_end_token_is_passed_only_when_told(forced):
    text = "before<|im_end|>after"
    assert forced(text).text == "before"
    done = forced(text, ignore_eos=True, max_tokens=3)
    assert (done.text, done.finish_reason, len(done.token_ids)) == ("beforeafter", "length", 3)


def test_nothing_stops_before_min_tokens_and_what_stood_before_does_not_stop_later(forced, embedded_tokenizer):
    text = "x\ny\nz\nw\n"
    ids = embedded_tokenizer.encode(text)
    assert len(ids) == 8
    for least in range(8):
        done = forced(text, stop=["\n"], min_tokens=least)
        assert (done.stop_reason, len(done.token_ids)) == ("\n", least + 1 if least % 2 else least + 2)
        assert done.text == text[: len(done.token_ids) - 1]
    assert forced("a<|im_end|>b<|im_end|>c", min_tokens=2).text == "ab"


def test_the_prompt_s_text_does_not_stop(forced):
    assert forced("Write it down again", stop=["down"], max_tokens=3).text == "Write it "
    assert forced("again", stop=["Write", "down"]).text == "again"


def test_a_control_word_is_met_as_a_token_and_the_models_own_end_keeps_its_reason(embedded_tokenizer):
    rules = Rules.of(SamplingParams(stop=["<|im_start|>", "<|im_end|>", "x"]), eos_token_ids=[END], vocabulary=embedded_tokenizer)
    assert rules.end_reasons == {END: END, 1: "<|im_start|>"}
    with pytest.raises(ValueError, match="no tokenizer"):
        Rules.of(SamplingParams(stop=["x"]), eos_token_ids=[END], vocabulary=None)
