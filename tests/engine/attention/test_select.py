"""Which backend serves: the named one or a refusal with the reason, never another in silence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine import plugins
from engine.attention.select import AUTO_ORDER, select


def test_auto_knows_only_files_that_are_there():
    assert set(AUTO_ORDER) <= set(plugins.names("engine.attention.backends"))


def test_auto_takes_the_first_that_does_not_refuse(paged_world):
    spec = paged_world().spec
    assert type(select("auto", spec=spec)).__module__.endswith("sdpa")
    assert type(select("auto", spec=replace(spec, batch_invariant=True))).__module__.endswith("reference")


def test_an_unknown_name_is_refused_with_the_choices(paged_world):
    with pytest.raises(ValueError, match=r"engine\.attention: there is no 'sdpaa'; choose one of .*reference"):
        select("sdpaa", spec=paged_world().spec)
