"""Packed products of both kinds against float64, at sizes that fill no tile, and bit for bit the same in any company."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.cpu.decoder import PackedLinear

# (in, out): the embedded model's shapes, cut where they are long, and some that fill neither a panel nor a step
SHAPES = [(576, 960), (1536, 576), (64, 64), (100, 70), (33, 1), (2, 129), (7, 63)]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(library, weight, **settings):
    return PackedLinear(library, weight, **settings)


@pytest.fixture(params=[False, True], ids=["bf16", "int8"])
def int8(request) -> bool:
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 13, 300])
def test_products_are_right(library, shape, num_rows):
    num_in, num_out = shape
    weight, bias, x = numbers(num_out, num_in), numbers(num_out, seed=1), numbers(num_rows, num_in, seed=2)
    expected = x.double() @ weight.double().T
    # float32 sums of n products of about 1: the rounding grows with sqrt(n), and 40 of it is far from any fault
    bound = 40 * torch.finfo(torch.float32).eps * num_in**0.5
    torch.testing.assert_close(packed(library, weight)(x).double(), expected, atol=bound, rtol=bound)
    torch.testing.assert_close(packed(library, weight, bias=bias)(x).double(), expected + bias.double(), atol=bound, rtol=bound)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 70])
def test_whole_numbers_go_through_int8_exactly(library, shape, num_rows):
    """Where each group's and each output's largest number is 127, its scale is 1 and nothing is rounded."""
    num_in, num_out = shape
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randint(-127, 128, (n, num_in), generator=generator).bfloat16() for n in (num_out, num_rows))
    weight[:, 0] = 127
    x[:, ::64] = -127
    assert torch.equal(packed(library, weight, int8=True)(x).double(), x.double() @ weight.double().T)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_is_off_by_its_rounding_at_most(library, shape):
    """Half a scale for each input and each weight; a scale is the largest of an output, or of 64 inputs, by 127."""
    num_in, num_out = shape
    weight, x = numbers(num_out, num_in).double(), numbers(37, num_in, seed=1).double()
    x[:, 7::64] *= 50  # outliers, which cost their own group only
    weight_scale = weight.abs().amax(1, keepdim=True) / 127
    groups = torch.nn.functional.pad(x, (0, -num_in % 64)).unflatten(1, (-1, 64))
    x_scale = (groups.abs().amax(2, keepdim=True) / 127).expand_as(groups).flatten(1)[:, :num_in]
    bound = (
        0.5 * x_scale @ weight.abs().T
        + 0.5 * x.abs() @ weight_scale.expand_as(weight).T
        + 0.25 * x_scale @ weight_scale.expand_as(weight).T
    )
    found = packed(library, weight.bfloat16(), int8=True)(x.bfloat16()).double()
    assert ((found - x @ weight.T).abs() <= 1.01 * bound).all()
    typical = (found - x @ weight.T).abs().mean() / bound.mean()
    assert num_in < 64 or typical < 0.2, "roundings go both ways and mostly cancel"


def test_weights_and_inputs_may_be_views(library, int8):
    weight, x = numbers(70, 500)[:, 100:200], numbers(9, 300, seed=1)[::2, 50:150]
    assert torch.equal(packed(library, weight, int8=int8)(x), packed(library, weight.contiguous(), int8=int8)(x.contiguous()))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_rows_do_not_see_each_other(library, int8, num_threads):
    x = numbers(61, 576, seed=1)
    one_by_one = packed(library, numbers(200, 576), int8=int8)
    alone = torch.cat([one_by_one(row[None]) for row in x])
    linear = packed(library, numbers(200, 576), int8=int8, num_threads=num_threads)
    for num_rows in (1, 2, 3, 8, 33, 61):
        assert torch.equal(linear(x[:num_rows]), alone[:num_rows])
    order = torch.randperm(61, generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear(x[order]), alone[order])


def test_what_is_no_number_stays_in_its_row(library, int8):
    linear = packed(library, numbers(70, 100, seed=1), int8=int8)
    x = numbers(8, 100)
    expected = linear(x)
    x[3, 5], x[6, 7] = torch.nan, torch.inf
    found = linear(x)
    assert not found[[3, 6]].isfinite().any()
    others = [0, 1, 2, 4, 5, 7]
    assert torch.equal(found[others], expected[others])


def test_zeros_stay_zeros_in_int8(library):
    weight = numbers(70, 100)
    weight[3] = 0
    linear = packed(library, weight, int8=True)
    assert not linear(torch.zeros(2, 100).bfloat16()).any() and not linear(torch.full((2, 100), 1e-38).bfloat16()).any()
    assert not linear(numbers(5, 100, seed=1))[:, 3].any()
