"""Every test of the kernels runs in each tier that this machine can build and run."""

from __future__ import annotations

import pytest

from engine.kernels.cpu import build


@pytest.fixture(scope="session", params=build.TIERS)
def library(request):
    try:
        return build.load(request.param)
    except build.Unavailable as reason:
        pytest.skip(str(reason))
