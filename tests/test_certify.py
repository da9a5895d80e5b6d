"""The certify tier: counts, seeds, resuming."""

from pathlib import Path

import pytest
import torch

from m3_hw.dispatch import specs
from m3_hw.draw import RANGES, Draw
from m3_hw.errors import BundleError
from m3_hw.parity.cases import make_call, make_draw
from m3_hw.parity.certify import certify
from m3_hw.parity.checks import same_bits
from m3_hw.parity.results import Case
from m3_hw.parity.run import Options

OPTIONS = Options(ops=("rms_norm",), backends=("cpu",))


class InterruptError(Exception):
    pass


def numbers(report) -> list[tuple]:
    return [(r.case.id, r.cases, r.status, r.metrics) for r in report.results]


def test_certify_draws_as_many_cases_as_asked_for() -> None:
    report = certify(OPTIONS, cases=10)
    assert report.passed
    assert sum(result.cases for result in report.results) == 10
    assert [result.cases for result in report.results] == [4, 3, 3]


def test_certify_gives_the_same_numbers_again_and_others_for_another_seed() -> None:
    first, second = certify(OPTIONS, cases=12), certify(OPTIONS, cases=12)
    other = certify(Options(ops=OPTIONS.ops, backends=OPTIONS.backends, seed=1), cases=12)
    assert numbers(first) == numbers(second)
    assert numbers(first) != numbers(other)


def test_certify_goes_on_where_it_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m3_hw.parity.certify.SAVE_EVERY_SECONDS", 0.0)
    state = tmp_path / "state.json"
    seen = []

    def stop_after_seven(result, done: int, total: int) -> None:
        seen.append(done)
        if done == 7:
            raise InterruptError

    with pytest.raises(InterruptError):
        certify(OPTIONS, cases=20, state=state, progress=stop_after_seven)
    resumed = []
    report = certify(OPTIONS, cases=20, state=state, progress=lambda result, done, total: resumed.append((done, total)))
    assert resumed[0] == (7, 20)
    assert resumed[-1] == (20, 20)
    assert numbers(report) == numbers(certify(OPTIONS, cases=20))


def test_certify_refuses_the_state_of_another_run(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    certify(OPTIONS, cases=3, state=state)
    with pytest.raises(BundleError, match="another run"):
        certify(OPTIONS, cases=4, state=state)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"results": [1]}', '{"results": 3}'])
def test_certify_refuses_a_damaged_state(tmp_path: Path, text: str) -> None:
    state = tmp_path / "state.json"
    state.write_text(text)
    with pytest.raises(BundleError, match="state"):
        certify(OPTIONS, cases=3, state=state)


def test_random_cases_draw_several_value_ranges_and_shapes() -> None:
    cases = [Case("rms_norm", "cpu", "float32", f"random_{i}", "certify") for i in range(40)]
    assert len({make_draw(case).value_range for case in cases}) >= 5
    assert len({tuple(make_call(case)["x"].shape) for case in cases}) >= 30


@pytest.mark.parametrize("op", ["dense_attention", "varlen_attention"])
def test_drawn_attention_scores_stay_where_fp32_knows_them(op: str) -> None:
    for value_range in RANGES:
        draw = Draw(7, value_range)
        call = specs()[op].random_sample(draw, torch.float32)
        keys = call["k"] if op == "varlen_attention" else call["k_cache"]
        spread = call["q"].std() * keys.float().std() * call["q"].shape[-1] ** 0.5 * call["scale"]
        assert spread < 4, f"{value_range}: scores of standard deviation {spread}"


def test_inputs_are_the_same_for_every_backend_and_in_every_run() -> None:
    calls = [make_call(Case("rms_norm", backend, "bfloat16", "random_3", "certify")) for backend in ("cpu", "cuda", "cpu")]
    assert all(same_bits(calls[0]["x"], call["x"]) for call in calls)
