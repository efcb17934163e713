"""With batch_invariant a row's numbers are the same alone, in any crowd and at any place in it, bit for bit."""

from __future__ import annotations

import pytest
import torch

from engine.layers.decoder import Decoder, DecoderSpec, RopeSpec
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm

# (in, out) of every linear of the embedded model: q/k/v, o, gate/up, down, and a cut of the vocabulary
_SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 4096)]


def _filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(module.named_parameters()):
        owner = module.get_submodule(name.rpartition(".")[0])
        value = torch.randn(parameter.shape, generator=generator) * 0.1 + ("norm" in name)
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(value, requires_grad=False))
    return module


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_linear_rows_do_not_see_each_other(shape):
    linear = _filled(Linear(*shape, bias=shape == _SHAPES[0], batch_invariant=True))
    rows = torch.randn(37, shape[0], generator=torch.Generator().manual_seed(1))
    alone = torch.cat([linear(rows[i : i + 1]) for i in range(len(rows))])
    for num_rows in (3, 16, 17, 37):
        assert torch.equal(linear(rows[:num_rows]), alone[:num_rows])
    order = torch.randperm(37, generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear(rows[order]), alone[order])
    torch.testing.assert_close(alone, torch.nn.functional.linear(rows, linear.weight, linear.bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_decoder_rows_do_not_see_each_other(num_threads):
    """The whole decoder, norms and activations included, at thread counts that cut tensors at odd places."""
    spec = DecoderSpec(
        model_type="llama",
        vocab_size=50,
        hidden_size=72,
        intermediate_size=200,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=12,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope=RopeSpec(),
        tie_word_embeddings=False,
        qk_norm=True,
    )
    decoder = _filled(Decoder(spec, batch_invariant=True))

    def only_itself(layer, q_THD, k_TKD, v_TKD):
        return (q_THD * k_TKD.repeat_interleave(3, dim=1)).sigmoid().round() + v_TKD.repeat_interleave(3, dim=1)

    generator = torch.Generator().manual_seed(3)
    ids, positions = torch.randint(0, 50, (701,), generator=generator), torch.randint(0, 2048, (701,), generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        crowd = decoder.logits(decoder(ids, positions, only_itself))
        for i in (0, 1, 15, 16, 233, 350, 351, 467, 468, 700):
            hidden = decoder(ids[i : i + 1], positions[i : i + 1], only_itself)
            assert torch.equal(decoder.logits(hidden)[0], crowd[i]), i
    finally:
        torch.set_num_threads(before)


def test_norm_equals_its_formula():
    norm = _filled(RMSNorm(24, eps=1e-3))
    x = torch.randn(5, 24, dtype=torch.float64)
    expected = norm.weight.double() * x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x.float()).double(), expected, atol=1e-6, rtol=1e-5)
