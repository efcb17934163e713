"""The fused head against the logits that the same weights give: the likeliest token and its log-softmax."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.cpu.decoder import PackedLinear

VOCAB, SIZE = 5003, 64


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(scope="module", params=[False, True], ids=["bf16", "int8"])
def head(request, library):
    return PackedLinear(library, numbers(VOCAB, SIZE), int8=request.param)


def test_it_is_the_argmax_and_its_log_softmax(head):
    hidden = numbers(50, SIZE, seed=1)
    logits = head(hidden)
    for num_valid in (VOCAB, VOCAB - 1, VOCAB - 3000, 65, 64, 63, 1):
        token_ids, logprobs = head.greedy(hidden, num_valid=num_valid)
        expected = logits[:, :num_valid].argmax(-1)
        assert torch.equal(token_ids.long(), expected)
        exact = logits.double().log_softmax(-1).gather(1, expected[:, None]).squeeze(1)
        torch.testing.assert_close(logprobs.double(), exact, atol=2e-5, rtol=1e-6)


def test_of_equal_logits_the_lowest_id_wins(library):
    weight = numbers(VOCAB, SIZE)
    hidden = torch.cat((numbers(2, SIZE, seed=1), torch.zeros(1, SIZE).bfloat16()))  # of zero, all logits are equal
    best = PackedLinear(library, weight).greedy(hidden, num_valid=VOCAB)[0][0]
    for copy_at in (0, 17, 4999):
        copied = weight.clone()
        copied[copy_at] = weight[best]
        token_ids, _ = PackedLinear(library, copied).greedy(hidden, num_valid=VOCAB)
        assert token_ids[0] == min(copy_at, int(best)) and token_ids[2] == 0


def test_steep_and_flat_rows(head):
    hidden = numbers(6, SIZE, seed=1) * torch.tensor([[0.0], [1e-3], [1.0], [10.0], [100.0], [1000.0]]).bfloat16()
    token_ids, logprobs = head.greedy(hidden, num_valid=VOCAB)
    exact = head(hidden).double().log_softmax(-1).gather(1, token_ids[:, None].long()).squeeze(1)
    torch.testing.assert_close(logprobs.double(), exact, atol=2e-5, rtol=1e-6)


def test_a_row_of_no_numbers_says_so_and_harms_nobody(head):
    hidden = numbers(5, SIZE, seed=1)
    expected_ids, expected = head.greedy(hidden, num_valid=VOCAB)
    hidden[1, 3], hidden[3, 9] = torch.nan, torch.inf
    token_ids, logprobs = head.greedy(hidden, num_valid=VOCAB)
    assert logprobs[[1, 3]].isnan().all()
    assert torch.equal(logprobs[[0, 2, 4]], expected[[0, 2, 4]]) and torch.equal(token_ids[[0, 2, 4]], expected_ids[[0, 2, 4]])


def test_one_weight_that_is_no_number_is_enough(library):
    weight = numbers(VOCAB, SIZE)
    for value in (torch.nan, torch.inf):
        for row in (0, 70, VOCAB - 1):
            broken = weight.clone()
            broken[row, 0] = value
            assert PackedLinear(library, broken).greedy(numbers(1, SIZE, seed=1), num_valid=VOCAB)[1].isnan().all()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_rows_do_not_see_each_other(library, head, num_threads):
    hidden = numbers(23, SIZE, seed=1)
    alone = [head.greedy(row[None], num_valid=VOCAB) for row in hidden]
    together = PackedLinear(library, numbers(VOCAB, SIZE), int8=head.scales is not None, num_threads=num_threads)
    token_ids, logprobs = together.greedy(hidden, num_valid=VOCAB)
    assert torch.equal(token_ids, torch.cat([ids for ids, _ in alone]))
    assert torch.equal(logprobs, torch.cat([values for _, values in alone]))
