"""The engine with a real, tiny model: whatever runs beside a request, its answer is its own (I4).

In float32 with ``batch_invariant`` where answers to different batches are compared token by token.
"""

from __future__ import annotations

import json
import random
import shutil

import pytest

from engine import Completion, Engine, EngineConfig, Grammar, KVCacheConfig, ModelConfig, Request, SamplingParams, Tokenizer

BLOCK = 16


@pytest.fixture
def make(tiny_model):
    """``make(path=None, num_blocks=..., ...)`` builds an engine; keys of KVCacheConfig go there, the others to EngineConfig."""

    def build(*, path: str = tiny_model, num_blocks: int = 400, prefix_cache: bool = True, **settings) -> Engine:
        return Engine.from_config(
            model=ModelConfig(path=path, dtype="float32"),
            engine=EngineConfig(**{"batch_invariant": True, "max_num_seqs": 16, "threads": 1} | settings),
            kv_cache=KVCacheConfig(num_blocks=num_blocks, block_size=BLOCK, prefix_cache=prefix_cache),
        )

    return build


def answers(engine: Engine, requests: list[Request]) -> dict:
    """Request id -> its completions, in sample order."""
    found: dict = {}
    for completion in engine.generate(requests):
        assert completion.finish_reason == "error" or completion.token_ids, "an answer is never empty in silence"
        assert all(0 <= token_id < engine.tokenizer.vocab_size for token_id in completion.token_ids)
        found.setdefault(completion.request_id, []).append(completion)
    return found


def tokens(engine: Engine, requests: list[Request]) -> dict:
    return {id_: [completion.token_ids for completion in samples] for id_, samples in answers(engine, requests).items()}


def one(engine: Engine, prompt: list[int], **sampling) -> Completion:
    (completion,) = answers(engine, [Request(id="one", prompt_token_ids=prompt, sampling=SamplingParams(**sampling))])["one"]
    return completion


def prompt(length: int, *, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(97, 123) for _ in range(length)]


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"enum": [1, 20]}}}, "required": ["a"]}
FORMS = (Grammar.json_schema(SCHEMA), Grammar.regex("[a-z]+(, [a-z]+)*"), Grammar.choice(["yes", "no", "perhaps"]), Grammar.json_object())


def mixed(count: int) -> list[Request]:
    """Rows with all kinds of settings, in families that share long beginnings."""
    dice = random.Random(5)
    rows = []
    for i in range(count):
        sampling = {
            "n": dice.choice([1, 1, 2, 4]),
            "temperature": dice.choice([0.0, 0.7, 1.0, 1.5]),
            "seed": dice.choice([None, 7, i]),
            "top_p": dice.choice([1.0, 0.9]),
            "top_k": dice.choice([0, 20]),
            "repetition_penalty": dice.choice([1.0, 1.3]),
            "presence_penalty": dice.choice([0.0, 0.5]),
            "logprobs": dice.choice([None, 3]),
            "prompt_logprobs": dice.choice([None, None, 0]),
            "stop": dice.choice([(), ("a", "zz")]),
            "stop_token_ids": dice.choice([(), (101,)]),
            "min_tokens": dice.choice([0, 3]),
            "logit_bias": dice.choice([{}, {120: 2.0}]),
            "bad_words": dice.choice([(), ("e", "oo")]),
            "max_tokens": dice.randrange(4, 60),
        }
        grammar = FORMS[i % 20] if i % 20 < len(FORMS) else None
        if grammar is not None:  # a form ends where it ends, and takes all of the tokens that it allows
            sampling |= {"min_tokens": 0, "stop": (), "stop_token_ids": (), "bad_words": (), "max_tokens": dice.randrange(30, 60)}
        ids = prompt(40, seed=dice.randrange(3)) + prompt(dice.randrange(1, 30), seed=i)
        rows.append(Request(id=i, prompt_token_ids=ids, sampling=SamplingParams(**sampling), grammar=grammar))
    return rows


def numbers(found: dict) -> dict:
    """All that must be equal: everything but how many prompt tokens came from the cache."""
    return {
        id_: [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs, c.top_logprobs, c.prompt_logprobs) for c in samples]
        for id_, samples in found.items()
    }


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.full)])
def test_mixed_rows_are_the_same_alone_together_shuffled_squeezed_and_without_a_cache(make, count):
    """The squeezed pool has a 20th of the blocks that the others have."""
    requests = mixed(count)
    alone = make()
    expected = {}
    for request in requests:
        expected |= numbers(answers(alone, [request]))
    assert {finish_reason for samples in expected.values() for _, _, finish_reason, *_ in samples} == {"stop", "length"}
    shuffled = random.Random(1).sample(requests, len(requests))
    assert numbers(answers(make(), requests)) == expected
    assert numbers(answers(make(), shuffled)) == expected
    assert numbers(answers(make(prefix_cache=False), requests)) == expected
    assert numbers(answers(make(max_num_batched_tokens=16), shuffled)) == expected
    squeezed = make(num_blocks=20)
    assert numbers(answers(squeezed, requests)) == expected
    assert squeezed.stats.num_preemptions > 0
    assert squeezed.scheduler.kv.num_held == 0


def test_a_seeded_row_does_not_see_its_neighbours(make):
    own = Request(id="own", prompt_token_ids=prompt(20), sampling=SamplingParams(seed=42, temperature=0.9, max_tokens=24, ignore_eos=True))
    others = [
        Request(id=i, prompt_token_ids=prompt(9 + i, seed=i), sampling=SamplingParams(temperature=0.9, max_tokens=20)) for i in range(7)
    ]
    engine = make()
    alone = tokens(engine, [own])["own"]
    assert tokens(engine, [own, *others])["own"] == tokens(engine, [*reversed(others), own])["own"] == alone
    renamed = Request(id="another name", prompt_token_ids=own.prompt_token_ids, sampling=own.sampling)
    assert tokens(engine, [renamed])["another name"] == alone, "a seed alone decides, not the name"


def test_seeds_and_names_tell_equal_prompts_apart(make):
    def row(id_, seed):
        return Request(id=id_, prompt_token_ids=prompt(12), sampling=SamplingParams(seed=seed, max_tokens=12, ignore_eos=True))

    found = tokens(make(), [row("a", 1), row("b", 2), row("c", None), row("d", None)])
    assert len({samples[0] for samples in found.values()}) == 4


def test_samples_differ_and_come_again(make):
    def drawn(n: int, **sampling) -> list[tuple[int, ...]]:
        params = SamplingParams(**{"n": n, "seed": 7, "max_tokens": 8, "ignore_eos": True} | sampling)
        return tokens(make(), [Request(id="n", prompt_token_ids=prompt(10), sampling=params)])["n"]

    five = drawn(5)
    assert len(set(five)) == 5
    assert drawn(5) == five
    assert drawn(1) == five[:1], "the first sample is the one that a row with n=1 gets"
    greedy = drawn(3, temperature=0.0)
    assert len(greedy) == 3 and len(set(greedy)) == 1, "n greedy samples are n equal ones"


@pytest.mark.parametrize("switched_off", [{"top_k": -1}, {"top_k": 10**9}, {"top_k": 2**31}, {"top_p": 1.0}, {"repetition_penalty": 1.0}])
def test_filters_past_their_range_are_off(make, switched_off):
    plain = {"seed": 3, "max_tokens": 12, "ignore_eos": True}
    engine = make()
    assert one(engine, prompt(8), **plain, **switched_off).token_ids == one(engine, prompt(8), **plain).token_ids


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-8}])
def test_the_narrowest_filters_are_greedy_and_greedy_rows_do_not_see_them(make, narrow):
    engine = make()
    greedy = one(engine, prompt(8), temperature=0.0, max_tokens=12, ignore_eos=True).token_ids
    rows = [
        Request(id=0, prompt_token_ids=prompt(8), sampling=SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)),
        Request(id=1, prompt_token_ids=prompt(8), sampling=SamplingParams(**narrow, max_tokens=12, ignore_eos=True)),
        Request(id=2, prompt_token_ids=prompt(8), sampling=SamplingParams(temperature=100.0, max_tokens=12, ignore_eos=True)),
    ]
    found = tokens(engine, rows)
    assert found[0] == found[1] == [greedy]
    assert found[2] != [greedy]


@pytest.mark.parametrize(
    "penalties",
    [{}, {"repetition_penalty": 1.3}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 0.7}],
)
def test_penalties_are_those_of_a_plain_loop_over_transformers(make, tiny_model, penalties):
    """Repetition counts the prompt as transformers' generate does, presence and frequency count the answer only."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    repetition = transformers.RepetitionPenaltyLogitsProcessor(penalties.get("repetition_penalty", 1.0))
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, **penalties)
    requests = [Request(id=seed, prompt_token_ids=prompt(6, seed=seed) * 3, sampling=params) for seed in range(20)]
    found = tokens(make(), requests)
    for request in requests:
        expected = list(request.prompt_token_ids)
        for _ in range(16):
            with torch.inference_mode():
                logits = model(torch.tensor([expected])).logits[:, -1]
            logits = repetition(torch.tensor([expected]), logits)
            counts = torch.bincount(torch.tensor(expected[18:], dtype=torch.long), minlength=logits.shape[-1])
            logits -= penalties.get("presence_penalty", 0.0) * (counts > 0) + penalties.get("frequency_penalty", 0.0) * counts
            expected.append(int(logits.argmax()))
        assert found[request.id] == [tuple(expected[18:])]


@pytest.mark.parametrize("word", [" ", "  ", "a", " a", "ab"])
def test_bad_words_do_not_show_up(make, word):
    pull = {32: 50, 64: 50, 65: 50, 66: 50}
    found = one(make(), prompt(8), temperature=0.0, max_tokens=12, ignore_eos=True, bad_words=[word], logit_bias=pull)
    assert word.strip(" ") or " " not in found.text
    assert not word.strip(" ") or word.strip(" ") not in found.text


@pytest.fixture
def two_ends(tiny_model, tmp_path) -> str:
    """The tiny model with a second end token."""
    folder = tmp_path / "two-ends"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 257]}))
    return str(folder)


@pytest.mark.parametrize("end", [256, 257])
@pytest.mark.parametrize("length", [1, 100])
def test_min_tokens_counts_the_answer_and_holds_back_every_end_token(make, two_ends, end, length):
    engine = make(path=two_ends)
    for least in (0, 1, 4):
        done = one(engine, prompt(length), temperature=0.0, min_tokens=least, max_tokens=16, logit_bias={256: 50, 257: 50, end: 100})
        assert (len(done.token_ids), done.token_ids[-1]) == (least + 1, end)
        assert not {256, 257} & set(done.token_ids[:-1])
        assert (done.finish_reason, done.stop_reason) == ("stop", end)
    passed = one(engine, prompt(length), temperature=0.0, ignore_eos=True, max_tokens=5, logit_bias={end: 100})
    assert (passed.token_ids, passed.finish_reason) == ((end,) * 5, "length")


@pytest.mark.parametrize("budget", [16, 64, 256])
def test_prompt_logprobs_come_from_no_cache(make, budget):
    engine = make(max_num_batched_tokens=budget)
    ids = prompt(64)
    plain = one(engine, ids, temperature=0.0, max_tokens=1)
    first, second = (one(engine, ids, temperature=0.0, max_tokens=1, prompt_logprobs=1) for _ in range(2))
    assert first.prompt_logprobs == second.prompt_logprobs
    assert len(first.prompt_logprobs) == len(first.prompt_top_logprobs) == 63
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert first.token_ids == plain.token_ids
    for logprob, ((_, best),) in zip(first.prompt_logprobs, first.prompt_top_logprobs, strict=True):
        assert logprob <= best
    # Each prompt token's entry is what drawing that token after the tokens before it gives.
    drawn = one(engine, ids[:40], max_tokens=1, allowed_token_ids=[ids[40]])
    assert drawn.logprobs[0] == first.prompt_logprobs[39]


def test_log_probabilities_of_given_tokens(make):
    engine = make()
    ids = prompt(9)
    labels = one(engine, ids, temperature=0.0, max_tokens=2, logprob_token_ids=[65, 66])
    every = one(engine, ids, temperature=0.0, max_tokens=2, logprobs=1024)
    assert [[token_id for token_id, _ in pairs] for pairs in labels.top_logprobs] == [[65, 66]] * 2
    for pairs, all_pairs, logprob in zip(labels.top_logprobs, every.top_logprobs, every.logprobs, strict=True):
        assert dict(pairs).items() <= dict(all_pairs).items()
        assert all_pairs[0][1] == logprob, "greedy took the likeliest"


def test_a_second_copy_reads_the_cache_and_gives_the_same(make):
    system = prompt(100, seed=9)
    rows = [Request(id=i, prompt_token_ids=system + prompt(20, seed=i), sampling=SamplingParams(temperature=0.0)) for i in range(6)]
    engine = make()
    first, second = answers(engine, rows), answers(engine, rows)
    assert numbers(first) == numbers(second) == numbers(answers(make(prefix_cache=False), rows))
    assert all(samples[0].num_cached_tokens >= 112 for samples in second.values())


def test_prompts_around_block_borders_twice(make):
    engine = make()
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49):
        first, second = (one(engine, prompt(length, seed=length), temperature=0.0, max_tokens=BLOCK, ignore_eos=True) for _ in range(2))
        assert first.token_ids == second.token_ids
        part = (length - 1) % BLOCK  # of the block that the first answer filled
        assert second.num_cached_tokens == length - 1 - (part if part < BLOCK // 4 else 0)


def test_a_block_that_is_used_again_forgets_what_it_held(make):
    engine = make(num_blocks=8, max_num_seqs=1)
    a, b, c = (prompt(80, seed=seed) for seed in range(3))
    found = [one(engine, ids, temperature=0.0, max_tokens=8).token_ids for ids in (a, b, c, a, b)]
    assert found[3:] == found[:2]


def test_rows_around_one_that_is_too_long_finish(make):
    """One limit everywhere: the pool's where it is the smaller one."""
    engine = make(num_blocks=8)
    rows = [
        Request(id="big", prompt_token_ids=prompt(200)),
        Request(id="edge", prompt_token_ids=prompt(120), sampling=SamplingParams(max_tokens=500, ignore_eos=True)),
        *(Request(id=i, prompt_token_ids=prompt(20, seed=i), sampling=SamplingParams(max_tokens=4, ignore_eos=True)) for i in range(3)),
    ]
    found = {id_: samples[0] for id_, samples in answers(engine, rows).items()}
    assert found["big"].error_code == "too_long"
    assert "13 KV blocks" in found["big"].error_message and "has 8" in found["big"].error_message
    assert (found["edge"].finish_reason, found["edge"].stop_reason, len(found["edge"].token_ids)) == ("length", "context", 8)
    assert [len(found[i].token_ids) for i in range(3)] == [4] * 3
    assert engine.max_model_len == 128


def test_an_answer_to_the_context_s_end_says_so(make):
    engine = make(max_model_len=64)
    done = one(engine, prompt(60), max_tokens=100_000, ignore_eos=True)
    assert (len(done.token_ids), done.finish_reason, done.stop_reason) == (4, "length", "context")


def test_ids_that_no_tokenizer_knows_are_never_drawn(make, tiny_model, tmp_path):
    """A checkpoint whose embedding has more rows than the tokenizer has words."""
    import torch.nn.functional as F
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "padded"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = F.pad(weights[name], (0, 0, 0, 40))
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 40}))
    params = SamplingParams(temperature=50.0, max_tokens=100, ignore_eos=True, n=8)
    drawn = tokens(make(path=str(folder)), [Request(id=0, prompt_token_ids=prompt(5), sampling=params)])[0]
    assert Tokenizer.load(ModelConfig(path=str(folder))).vocab_size == config["vocab_size"]
    assert max(token_id for sample in drawn for token_id in sample) < config["vocab_size"]
