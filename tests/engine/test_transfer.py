"""What is sent arrives, in its place and aligned; what is fetched is what was there when it was asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.transfer import Fetch, Packed, sent

SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)


@settings(deadline=None)
@given(shapes=SHAPES, wide=st.booleans(), data=st.data())
def test_arrays_lie_in_their_tensors_with_padding_behind(shapes, wide, data):
    packed = Packed(shapes, dtype=torch.int64 if wide else torch.int32, device=torch.device("cpu"))
    for _ in range(2):  # what is sent later stands in place of what was sent before
        lengths = [data.draw(st.integers(0, shape[0])) for shape in shapes]
        arrays = [
            np.random.default_rng(i).integers(-9, 9, (n, *shape[1:])) for i, (n, shape) in enumerate(zip(lengths, shapes, strict=True))
        ]
        packed.send(arrays, padding=-7)
        for tensor, array, shape in zip(packed.tensors, arrays, shapes, strict=True):
            assert tensor.shape == shape
            assert tensor[: len(array)].tolist() == array.tolist()
            assert (tensor[len(array) :] == -7).all()
            assert tensor.data_ptr() % 16 == 0 or tensor.numel() == 0


def test_more_than_there_is_room_for_is_a_fault():
    with pytest.raises(AssertionError, match="room"):
        Packed([(2,)], dtype=torch.int32, device=torch.device("cpu")).send([np.arange(3)])


def test_numbers_go_there_and_back(device):
    numbers = [1.5, -2.0, 0.25]
    tensor = sent(numbers, dtype=torch.float64, device=torch.device(device))
    assert tensor.device.type == device and tensor.dtype == torch.float64
    fetched = Fetch(tensor * 2)
    tensor.mul_(0)
    assert fetched.tolist() == [3.0, -4.0, 0.5]
