"""Which backend serves: the named one or a refusal with the reason, never another in silence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine import plugins
from engine.attention.select import AUTO_ORDER, select


def test_auto_knows_only_files_that_are_there():
    assert {name for order in AUTO_ORDER.values() for name in order} <= set(plugins.names("engine.attention.backends"))


def test_auto_takes_the_first_that_does_not_refuse(paged_world):
    spec = paged_world().spec
    assert type(select("auto", spec=spec)).__module__.endswith("sdpa")
    assert type(select("auto", spec=replace(spec, batch_invariant=True))).__module__.endswith("reference")


def test_an_unknown_name_is_refused_with_the_choices(paged_world):
    with pytest.raises(ValueError, match=r"engine\.attention: there is no 'sdpaa'; choose one of .*reference"):
        select("sdpaa", spec=paged_world().spec)


@pytest.mark.parametrize("change", [{"windowed": True}, {"soft_cap": 30.0}], ids=str)
@pytest.mark.parametrize(("name", "dtype"), [("cpu", torch.bfloat16), ("sdpa", torch.float32)])
def test_windows_and_caps_are_refused_by_those_that_lack_them(paged_world, name, dtype, change):
    with pytest.raises(
        ValueError, match=rf"engine\.attention: '{name}' cannot serve this run: it knows neither windows nor caps of scores"
    ):
        select(name, spec=replace(paged_world(dtype=dtype).spec, **change))


def test_auto_takes_no_kernels_in_an_interpreter(paged_world):
    assert type(select("auto", spec=paged_world(dtype=torch.float16).spec)).__module__.endswith("sdpa")


def test_auto_says_where_a_format_costs_the_fast_kernels(paged_world, caplog):
    plain = paged_world(backend="cpu", dtype=torch.bfloat16).spec
    select("auto", spec=plain)
    select("auto", spec=replace(plain, dtype=torch.float16, kv_format="fp4"))
    assert not caplog.messages, "nothing is lost: the kernels have them, or lack the dtype"

    assert type(select("auto", spec=replace(plain, kv_format="fp4"))).__module__.endswith("sdpa")
    (message,) = caplog.messages
    assert message.startswith("kv_cache.format=fp4: sdpa attends, which is slower than cpu: the kernels read keys and values in bf16")
