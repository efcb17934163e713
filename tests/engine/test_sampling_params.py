"""Settings out of range are refused by name, before any engine sees them."""

from __future__ import annotations

import math

import pytest

from engine.sampling_params import SamplingParams

BAD = [
    ("temperature", [-0.1, math.nan, math.inf, "0.7", True, None, 10**400, 1e39]),
    ("top_p", [0, 0.0, 1.01, -1, math.nan, "1"]),
    ("top_k", [-2, 2.5, "5", True]),
    ("min_p", [-0.1, 1.1]),
    ("repetition_penalty", [0, 0.0, -1, math.inf]),
    ("presence_penalty", [2.1, -2.1]),
    ("frequency_penalty", [2.1, "x"]),
    ("n", [0, -1, 1.0]),
    ("seed", [1.5, "7"]),
    ("max_tokens", [0, -1, 2.0, None]),
    ("min_tokens", [-1, 17]),
    ("logprobs", [-1, 1.0, True]),
    ("prompt_logprobs", [-1]),
    ("stop", [[""], "", [1], {"a": 1}, ["ok", ""]]),
    ("bad_words", [[""], [None], ["half \ud800"]]),
    ("stop_token_ids", [[-1], ["5"], 5, [1.0], [2**31]]),
    ("allowed_token_ids", [[], [-3]]),
    ("logit_bias", [{"a": 1}, {-1: 1}, {5: math.nan}, {5: None}, [5], [[math.inf, 1]], {5: 1e39}, {5: 10**400}]),
    ("ignore_eos", [1, "true", None]),
    ("skip_special_tokens", [0]),
    ("include_stop_str_in_output", ["no"]),
    ("num_beams", [0, -1, 2.0, True]),
    ("length_penalty", [11, -10.5, math.nan, "1"]),
    ("early_stopping", ["always", 1, None]),
]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD for value in values])
def test_out_of_range_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=rf"^sampling\.{key}: "):
        SamplingParams(**{key: value})


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": -1},
        {"top_k": 2**40},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 1e-8},
        {"temperature": 100},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"seed": -(2**70)},
    ],
)
def test_odd_values_in_range_are_taken(values):
    assert SamplingParams(**values) == SamplingParams.from_mapping(values)


def test_unknown_keys_are_refused_by_name():
    with pytest.raises(ValueError, match=r"unknown key 'temprature'; known keys are .*temperature"):
        SamplingParams.from_mapping({"temprature": 0.5})


def test_absent_and_null_keys_keep_the_defaults():
    defaults = SamplingParams(temperature=0.5, stop=("END",), logit_bias={3: 1.0})
    assert SamplingParams.from_mapping({"temperature": None, "max_tokens": 4}, defaults=defaults) == SamplingParams(
        temperature=0.5, stop=("END",), logit_bias={3: 1.0}, max_tokens=4
    )


def test_lists_and_texts_have_one_form():
    given = SamplingParams(stop="END", stop_token_ids=[1, 2], logit_bias={"7": 1, 8: -2}, allowed_token_ids=[4])
    assert SamplingParams(logit_bias=[(7, 1), (8, -2)]).logit_bias == given.logit_bias
    assert (given.stop, given.stop_token_ids, given.logit_bias, given.allowed_token_ids) == (("END",), (1, 2), {7: 1.0, 8: -2.0}, (4,))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_tokens": 9, "max_tokens": 3}, r"min_tokens: 9 is over sampling\.max_tokens \(3\)"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, r"n: 2 samples"),
        ({"num_beams": 4}, r"temperature: 1 draws by chance.* set it to 0"),
        ({"num_beams": 4, "temperature": 0.0, "n": 5}, r"n: 5 answers are more than sampling\.num_beams \(4\)"),
        ({"num_beams": 4, "temperature": 0.0, "stop": "END"}, r"stop: beams end at tokens only"),
        ({"num_beams": 4, "temperature": 0.0, "prompt_logprobs": 0, "max_tokens": 0}, r"num_beams: 4 beams"),
    ],
)
def test_settings_that_contradict_each_other(values, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**values)
