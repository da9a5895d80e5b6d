"""What a case's inputs look like when they reach a backend."""

import pytest
import torch
from torch import Tensor

from m3_hw.dispatch import specs
from m3_hw.parity.cases import clone
from m3_hw.parity.checks import Subject
from m3_hw.parity.results import Case


@pytest.mark.parametrize("op", [name for name, spec in specs().items() if any(s.name == "far_pages" for s in spec.samples)])
def test_pages_are_as_far_apart_for_the_backend_as_in_the_sample(op: str) -> None:
    subject = Subject(Case(op, "cpu", "bfloat16", "far_pages", "stress"))
    call = subject.on_device(subject.call)
    caches = [value for name, value in call.items() if name.endswith("cache") and value is not None]
    assert caches
    for cache in caches:
        assert cache.stride(0) == 2**30
        assert (cache.shape[0] - 1) * cache.stride(0) > 2**31, "no 32-bit offset reaches the last page"


def test_every_paged_operator_has_far_pages() -> None:
    paged = {name for name, spec in specs().items() if spec.pools}
    assert paged == {name for name, spec in specs().items() if any(s.name == "far_pages" for s in spec.samples)}


def test_a_copy_keeps_gaps_and_shares_nothing() -> None:
    x = torch.arange(24.0).view(4, 6)[:, ::2]
    copy = clone({"x": x, "y": x[:1].expand(4, 3), "eps": 1.0})
    assert isinstance(copy["x"], Tensor)
    assert copy["x"].stride() == x.stride()
    assert copy["x"].data_ptr() != x.data_ptr()
    assert torch.equal(copy["x"], x)
    assert torch.equal(copy["y"], x[:1].expand(4, 3))
