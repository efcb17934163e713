"""Beam search through the whole engine against transformers' generate: same tokens, same scores."""

from __future__ import annotations

from itertools import product

import pytest
import tokenizers
import torch
import transformers

from engine import Engine, EngineConfig, KVCacheConfig, ModelConfig, Request, SamplingParams

VOCAB = 60
END = (3, 17)
BLOCK_SIZE = 8
MAX_TOKENS = 12
PENALTIES = (0.0, 1.0, 2.0)
EARLY_STOPPING = (True, False, "never")


@pytest.fixture(scope="module", params=[1, 2, 3])
def model(request):
    torch.manual_seed(request.param)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=list(END),
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(("norm" in name) + 0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """What save_pretrained writes, with a tokenizer of one word a token."""
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w3", pad_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    return load(folder)


def load(folder, *, num_blocks=400, max_num_seqs=64) -> Engine:
    return Engine.from_config(
        model=ModelConfig(path=str(folder), dtype="float32"),
        engine=EngineConfig(attention="reference", device="cpu", threads=1, max_num_seqs=max_num_seqs),
        kv_cache=KVCacheConfig(format="fp32", block_size=BLOCK_SIZE, num_blocks=num_blocks),
    )


def prompt(length: int) -> list[int]:
    return [(7 * i + length) % (VOCAB - 20) + 20 for i in range(length)]


def params(**settings) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS} | settings)


def expected(model, request: Request, **more) -> list[tuple[list[int], float]]:
    """transformers' answers, cut after their end token, and their scores."""
    sampling, ids = request.sampling, list(request.prompt_token_ids)
    out = model.generate(
        torch.tensor([ids]),
        do_sample=False,
        num_beams=sampling.num_beams,
        num_return_sequences=sampling.n,
        max_new_tokens=sampling.max_tokens,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    answers = [row[len(ids) :].tolist() for row in out.sequences]
    cuts = [next((i + 1 for i, token_id in enumerate(answer) if token_id in END), len(answer)) for answer in answers]
    scores = out.sequences_scores.tolist() if sampling.num_beams > 1 else [None]
    return [(answer[:cut], score) for answer, cut, score in zip(answers, cuts, scores, strict=True)]


def check(engine, model, requests, **more) -> None:
    found: dict = {request.id: [] for request in requests}
    for completion in engine.generate(requests):
        assert completion.sample_index == len(found[completion.request_id])
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in END), completion
        found[completion.request_id].append((list(completion.token_ids), completion.beam_score))
    for request in requests:
        wanted = expected(model, request, **more)
        assert [tokens for tokens, _ in found[request.id]] == [tokens for tokens, _ in wanted], request
        if request.sampling.num_beams > 1:
            assert [score for _, score in found[request.id]] == pytest.approx([score for _, score in wanted], abs=1e-4, rel=1e-4)
    assert engine.scheduler.kv.num_held == 0


@pytest.mark.parametrize("num_beams", [1, 2, 4, 10])
def test_all_widths_penalties_and_stops_in_one_batch(engine, model, num_beams):
    """Prompts that fill their last block and that do not."""
    requests = [
        Request(
            id=f"{length} {penalty} {early}",
            prompt_token_ids=prompt(length),
            sampling=params(num_beams=num_beams, n=num_beams, length_penalty=penalty, early_stopping=early),
        )
        for length, penalty, early in product((15, 16, 23), PENALTIES, EARLY_STOPPING)
    ]
    check(engine, model, requests)


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
def test_end_tokens_that_are_most_likely_everywhere(engine, model, early_stopping):
    requests = [
        Request(
            id=f"{bias} {num_beams}",
            prompt_token_ids=prompt(9),
            sampling=params(
                num_beams=num_beams, n=2, length_penalty=0.7, early_stopping=early_stopping, logit_bias=dict.fromkeys(END, bias)
            ),
        )
        for bias, num_beams in product((1.5, 20.0), (2, 10))
    ]
    for request in requests:
        check(engine, model, [request], sequence_bias={(token_id,): bias for token_id, bias in request.sampling.logit_bias.items()})


def test_adjustments_are_not_normalised_again(engine, model):
    request = Request(id=0, prompt_token_ids=prompt(11), sampling=params(num_beams=4, n=4, repetition_penalty=1.4, min_tokens=5))
    check(engine, model, [request], repetition_penalty=1.4, min_new_tokens=5)
    bare = Request(id=0, prompt_token_ids=prompt(11), sampling=params(num_beams=4, n=4))
    assert expected(model, bare) != expected(model, request, repetition_penalty=1.4, min_new_tokens=5)


def test_more_answers_than_are_possible_are_an_error(engine):
    request = Request(id=0, prompt_token_ids=prompt(9), sampling=params(num_beams=4, n=3, max_tokens=1, allowed_token_ids=[30, 31]))
    (done,) = engine.generate([request])
    assert done.error_code == "bad_params" and "3 answers" in done.error_message and "2 that are possible" in done.error_message
    two = Request(id=0, prompt_token_ids=prompt(9), sampling=params(num_beams=4, n=2, max_tokens=1, allowed_token_ids=[30, 31]))
    assert sorted(completion.token_ids for completion in engine.generate([two])) == [(30,), (31,)]


def test_scarce_blocks_and_places_change_nothing(folder, model):
    engine = load(folder, num_blocks=7, max_num_seqs=10)
    requests = [
        Request(id=i, prompt_token_ids=prompt(10 + i), sampling=params(num_beams=num_beams, n=num_beams, early_stopping="never"))
        for i, num_beams in enumerate((4, 1, 10, 2))
    ]
    check(engine, model, requests)
    assert engine.stats.num_preemptions > 0


def test_logprobs_are_the_plain_ones_of_each_answer(engine, model):
    """Without adjustments their sum and the length give the score."""
    request = Request(
        id=0, prompt_token_ids=prompt(12), sampling=params(num_beams=4, n=3, length_penalty=0.5, logprobs=2, prompt_logprobs=0)
    )
    for completion in engine.generate([request]):
        ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]])
        with torch.inference_mode():
            plain = model(ids).logits[0].log_softmax(-1)
        own = plain[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
        assert completion.logprobs == pytest.approx(own[11:].tolist(), abs=1e-4)
        assert completion.prompt_logprobs == pytest.approx(own[:11].tolist(), abs=1e-4)
        assert completion.beam_score == pytest.approx(completion.cumulative_logprob / len(completion.token_ids) ** 0.5)
        best = plain[11:-1].topk(2).indices.tolist()
        assert [[token_id for token_id, _ in top] for top in completion.top_logprobs] == best
