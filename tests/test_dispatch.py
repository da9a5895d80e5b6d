"""Which backend runs a call, and what is said when none does."""

import contextvars
import threading
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import m3_hw
from m3_hw import BackendUnavailableError, ContractError, NotSupportedError, dispatch
from m3_hw.backend import Backend, Implementation
from m3_hw.backends.cpu import rms_norm as cpu
from m3_hw.draw import Draw

X, WEIGHT, EPS = torch.tensor([[3.0, 4.0]]), torch.zeros(2), 1e-6
CALL = (X, WEIGHT, EPS)
WIDE = (torch.ones(1, 9000, dtype=torch.float64), torch.zeros(9000, dtype=torch.float64), EPS)  # The toy refuses it twice over.


@pytest.fixture
def cpu_calls() -> Iterator[list[str]]:
    """Notes each call of the CPU backend's rms_norm."""
    calls: list[str] = []
    original = cpu.rms_norm

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        calls.append("rms_norm")
        return original(*args, **kwargs)

    empty_table = patch.dict(dispatch._operators["rms_norm"]._table, clear=True)  # So that the spy is what gets loaded.
    with empty_table, patch.object(cpu, "rms_norm", autospec=True, side_effect=spy):
        yield calls


# Selection


def test_auto_takes_the_cpu_backend_for_cpu_tensors_and_says_why(cpu_calls: list[str]) -> None:
    m3_hw.rms_norm(*CALL)
    assert cpu_calls
    selection = m3_hw.selected("rms_norm", *CALL)
    assert selection.backend == "cpu"
    assert "first backend for cpu tensors" in selection.reason
    assert "the device of the tensors" in selection.reason


def test_selected_says_what_asked_for_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3_HW_BACKEND", "cpu")
    assert m3_hw.selected("rms_norm", *CALL) == ("cpu", "asked for by name (M3_HW_BACKEND)")
    with m3_hw.use_backend("reference"):
        assert m3_hw.selected("rms_norm", *CALL) == ("reference", "asked for by name (use_backend())")


def test_selected_takes_a_call_by_name() -> None:
    assert m3_hw.selected("rms_norm", x=X, weight=WEIGHT, eps=EPS) == m3_hw.selected("rms_norm", *CALL)
    assert m3_hw.why_not("rms_norm", "cuda", x=X, weight=WEIGHT, eps=EPS) == m3_hw.why_not("rms_norm", "cuda", *CALL)


def test_selected_raises_what_the_call_would() -> None:
    with m3_hw.use_backend("cuda"), pytest.raises(BackendUnavailableError):
        m3_hw.selected("rms_norm", *CALL)
    with pytest.raises(ContractError, match="eps"):
        m3_hw.selected("rms_norm", X, WEIGHT, 0.0)


def test_selected_names_the_reference_where_the_call_would_fall_back(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    implementation = Implementation(lambda *call: None, lambda *call: ["no reason at all"])
    monkeypatch.setattr(Backend, "load", lambda self, spec: implementation)
    monkeypatch.setattr(dispatch._operators["rms_norm"], "_table", {})
    with pytest.raises(NotSupportedError, match="no reason at all"):
        m3_hw.selected("rms_norm", *CALL)
    monkeypatch.setenv("M3_HW_FALLBACK", "reference")
    assert m3_hw.selected("rms_norm", *CALL) == ("reference", "rms_norm on cpu: no reason at all (the device of the tensors)")
    assert not recwarn


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch, cpu_calls: list[str]) -> None:
    monkeypatch.setenv("M3_HW_BACKEND", "reference")
    m3_hw.rms_norm(*CALL)
    assert not cpu_calls


def test_the_variable_is_read_once(monkeypatch: pytest.MonkeyPatch, cpu_calls: list[str]) -> None:
    m3_hw.rms_norm(*CALL)
    monkeypatch.setenv("M3_HW_BACKEND", "reference")
    m3_hw.rms_norm(*CALL)
    assert len(cpu_calls) == 2


def test_use_backend_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch, cpu_calls: list[str]) -> None:
    monkeypatch.setenv("M3_HW_BACKEND", "cpu")
    with m3_hw.use_backend("reference"):
        m3_hw.rms_norm(*CALL)
    assert not cpu_calls


def test_use_backend_auto_goes_before_the_variable_too(monkeypatch: pytest.MonkeyPatch, cpu_calls: list[str]) -> None:
    monkeypatch.setenv("M3_HW_BACKEND", "reference")
    with m3_hw.use_backend("auto"):
        m3_hw.rms_norm(*CALL)
    assert cpu_calls


def test_use_backend_nests_and_ends_with_an_error() -> None:
    with m3_hw.use_backend("reference"):
        with m3_hw.use_backend("cpu"):
            assert m3_hw.selected("rms_norm", *CALL).backend == "cpu"
        with pytest.raises(RuntimeError, match="inside"), m3_hw.use_backend("cpu"):
            raise RuntimeError("inside")
        assert m3_hw.selected("rms_norm", *CALL).backend == "reference"
    assert dispatch.requested_backend().backend == "auto"


def test_use_backend_is_per_context() -> None:
    seen: dict[str, str] = {}

    def look(where: str) -> None:
        seen[where] = dispatch.requested_backend().backend

    def start(target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args)
        thread.start()
        thread.join()

    with m3_hw.use_backend("reference"):
        start(contextvars.Context().run, look, "another context")
        start(contextvars.copy_context().run, look, "a copy of this one")
    assert seen == {"another context": "auto", "a copy of this one": "reference"}


def test_a_compiled_graph_does_not_bake_in_the_backend(cpu_calls: list[str]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, weight: m3_hw.rms_norm(x, weight, EPS) + 1, fullgraph=True, backend="aot_eager")
    with m3_hw.use_backend("reference"):
        first = compiled(X, WEIGHT)
    assert not cpu_calls
    second = compiled(X, WEIGHT)
    assert len(cpu_calls) == 1
    torch.testing.assert_close(first, second)
    with m3_hw.use_backend("cuda"), pytest.raises(BackendUnavailableError):
        compiled(X, WEIGHT)


# Names


@pytest.mark.parametrize("name", ["cdua", "", "CPU", "npu"])
def test_use_backend_refuses_an_unknown_name_and_lists_the_known_ones(name: str) -> None:
    with pytest.raises(BackendUnavailableError, match=f"{name!r}; accepted: auto, reference, cpu, cuda, ascend"), m3_hw.use_backend(name):
        pass


def test_a_typo_in_the_variable_raises_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3_HW_BACKEND", "cdua")
    with pytest.raises(BackendUnavailableError, match="M3_HW_BACKEND has 'cdua'; accepted: auto, reference, cpu, cuda, ascend"):
        m3_hw.rms_norm(*CALL)


def test_a_plugin_is_among_the_known_names(toy_backend: Backend) -> None:
    with pytest.raises(BackendUnavailableError, match="ascend, toy"), m3_hw.use_backend("tyo"):
        pass


def test_an_unknown_operator_lists_the_known_ones() -> None:
    with pytest.raises(ContractError, match=r"op has 'rmsnorm'; accepted: .*rms_norm"):
        m3_hw.why_not("rmsnorm", "cpu")
    with pytest.raises(BackendUnavailableError, match="backend has 'cdua'; accepted: auto"):
        m3_hw.why_not("rms_norm", "cdua")


# Devices


@pytest.mark.parametrize(("backend", "device"), [("cuda", "cuda"), ("ascend", "npu")])
def test_a_backend_for_another_device_raises_and_moves_nothing(backend: str, device: str) -> None:
    with m3_hw.use_backend(backend), pytest.raises(BackendUnavailableError, match=f"takes {device} tensors, these are on cpu.*never moved"):
        m3_hw.rms_norm(*CALL)


def test_auto_without_a_backend_for_the_device_says_what_is_known() -> None:
    with pytest.raises(BackendUnavailableError, match="no backend for meta tensors; known: cpu, cuda, ascend"):
        dispatch._operators["rms_norm"].select("auto", "meta")


@pytest.mark.parametrize(("x", "weight"), [("cpu", "meta"), ("meta", "cpu")])
def test_mixed_devices_name_the_argument(x: str, weight: str) -> None:
    with pytest.raises(ContractError, match=f"rms_norm: weight has device {weight}; accepted: {x}, the device of the first argument"):
        m3_hw.rms_norm(X.to(x), WEIGHT.to(weight), EPS)


def test_meta_tensors_get_shapes_alone() -> None:
    assert m3_hw.rms_norm(X.to("meta"), WEIGHT.to("meta"), EPS).shape == X.shape


# Refusals


def test_why_not_gives_every_reason(toy_backend: Backend) -> None:
    assert m3_hw.why_not("rms_norm", "toy", *CALL) == []
    assert m3_hw.why_not("rms_norm", "toy", *WIDE) == [
        "x has dtype float64; supported: float32, bfloat16, float16",
        "x has rows of 9000; supported: up to 8192",
    ]


@pytest.mark.parametrize(("backend", "device"), [("cuda", "cuda"), ("ascend", "npu")])
def test_why_not_of_a_backend_that_is_not_written(backend: str, device: str) -> None:
    assert m3_hw.why_not("rms_norm", backend) == ["not written yet"]
    assert m3_hw.why_not("rms_norm", backend, *CALL) == ["not written yet", f"takes {device} tensors, these are on cpu"]


def test_why_not_is_empty_for_what_runs() -> None:
    for backend in ("cpu", "auto", "reference"):
        assert m3_hw.why_not("rms_norm", backend, *CALL) == []


def test_an_unsupported_call_raises_with_every_reason_and_the_way_out(toy_backend: Backend) -> None:
    with m3_hw.use_backend("toy"), pytest.raises(NotSupportedError) as caught:
        m3_hw.rms_norm(*WIDE)
    for part in ("rms_norm on toy", "float64", "rows of 9000", "M3_HW_FALLBACK=reference"):
        assert part in str(caught.value)
    with m3_hw.use_backend("toy"), pytest.raises(NotSupportedError, match=r"float64.*rows of 9000"):
        m3_hw.selected("rms_norm", *WIDE)


def test_a_missing_operator_raises_with_the_reason_of_unsupported_toml(toy_backend: Backend) -> None:
    call = next(iter(dispatch.specs()["swiglu_oai"].samples)).make(Draw(0), torch.float32)
    with m3_hw.use_backend("toy"), pytest.raises(NotSupportedError, match="swiglu_oai on toy: the toy backend has rms_norm alone"):
        m3_hw.swiglu_oai(**call)


def test_fallback_runs_the_reference_with_one_warning_per_operator_and_reason(
    toy_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("M3_HW_FALLBACK", "reference")
    double = (X.double(), WEIGHT.double(), EPS)
    with m3_hw.use_backend("toy"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [m3_hw.rms_norm(*double) for _ in range(3)]
        m3_hw.rms_norm(*WIDE)
        m3_hw.rms_norm(*CALL)
    assert [str(w.message) for w in caught] == [
        "rms_norm on toy: x has dtype float64; supported: float32, bfloat16, float16; running the reference instead",
        "rms_norm on toy: x has dtype float64; supported: float32, bfloat16, float16; x has rows of 9000; supported: up to 8192; "
        "running the reference instead",
    ]
    for result in results:
        torch.testing.assert_close(result, dispatch.specs()["rms_norm"].reference(*double), rtol=0, atol=0)


def test_fallback_serves_a_missing_operator_and_the_policy_is_read_anew(toy_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dispatch.specs()["swiglu_oai"]
    call = spec.samples[0].make(Draw(0), torch.float32)
    monkeypatch.setenv("M3_HW_FALLBACK", "reference")
    with m3_hw.use_backend("toy"), pytest.warns(RuntimeWarning, match="swiglu_oai on toy: .*running the reference instead"):
        torch.testing.assert_close(m3_hw.swiglu_oai(**call), spec.reference(**call), rtol=0, atol=0)
    monkeypatch.setenv("M3_HW_FALLBACK", "error")
    with m3_hw.use_backend("toy"), pytest.raises(NotSupportedError):
        m3_hw.swiglu_oai(**call)


def test_fallback_never_hides_a_backend_for_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3_HW_FALLBACK", "reference")
    with m3_hw.use_backend("cuda"), pytest.raises(BackendUnavailableError):
        m3_hw.rms_norm(*CALL)


def test_an_unknown_fallback_policy_raises(toy_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3_HW_FALLBACK", "cpu")
    with m3_hw.use_backend("toy"), pytest.raises(BackendUnavailableError, match="M3_HW_FALLBACK has 'cpu'; accepted: error, reference"):
        m3_hw.rms_norm(*WIDE)


def test_an_error_inside_a_backend_is_not_a_reason_to_fall_back(toy_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    import m3_hw_toy.rms_norm as toy

    monkeypatch.setenv("M3_HW_FALLBACK", "reference")
    broken = patch.object(toy, "rms_norm", autospec=True, side_effect=RuntimeError("kernel failed"))
    with broken, m3_hw.use_backend("toy"), pytest.raises(RuntimeError, match="kernel failed"):
        m3_hw.rms_norm(*CALL)


# The contract


def test_a_malformed_call_names_the_operator_the_argument_and_what_is_accepted() -> None:
    with pytest.raises(ContractError, match=r"rms_norm: weight has shape \[1\]; accepted: \[H=2\]"):
        m3_hw.rms_norm(X, WEIGHT[1:], EPS)
    with pytest.raises(ValueError, match="eps has value nan"):
        m3_hw.rms_norm(X, WEIGHT, float("nan"))


def test_a_malformed_call_is_refused_before_the_backend_is_called(cpu_calls: list[str]) -> None:
    for sample in dispatch.specs()["rms_norm"].error_samples:
        with pytest.raises(ContractError):
            m3_hw.rms_norm(**sample.change({"x": X, "weight": WEIGHT, "eps": EPS}))
    assert not cpu_calls


def test_a_malformed_call_is_refused_before_anything_is_written() -> None:
    spec = dispatch.specs()["write_kv"]
    for sample in spec.error_samples:
        call = sample.change(spec.samples[0].make(Draw(0), torch.float32))
        before = {name: call[name].clone() for name in spec.mutates if call[name] is not None}
        with pytest.raises(ContractError, match=sample.argument):
            m3_hw.write_kv(**call)
        for name, old in before.items():
            assert torch.equal(call[name].view(torch.uint8), old.view(torch.uint8)), f"{sample.name}: {name} was written"


def values_are_read_on(device: str) -> bool:
    """Whether a call's values would be checked for tensors of a device, without having one."""
    operator = dispatch._operators["rms_norm"]
    with patch.object(type(operator), "_check_devices"), patch.object(operator, "spec") as spec:
        operator.check(torch.device(device), CALL, {})
    return bool(spec.check_values.called)


def test_values_are_checked_on_the_cpu_always_and_elsewhere_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("M3_HW_CHECK", raising=False)
    assert values_are_read_on("cpu")
    assert not values_are_read_on("cuda")
    monkeypatch.setenv("M3_HW_CHECK", "1")
    dispatch._flag.cache_clear()
    assert values_are_read_on("cuda")


@pytest.mark.parametrize("variable", ["M3_HW_CHECK", "M3_HW_SIMULATE"])
def test_a_flag_takes_0_and_1_alone(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, on in (("0", False), ("1", True), ("", False)):
        monkeypatch.setenv(variable, value)
        dispatch._flag.cache_clear()
        assert dispatch._flag(variable) is on
    monkeypatch.setenv(variable, "yes")
    dispatch._flag.cache_clear()
    with pytest.raises(BackendUnavailableError, match=f"{variable} has 'yes'; accepted: 0, 1"):
        dispatch._flag(variable)


# Capabilities


def test_capabilities_list_every_operator_on_every_backend() -> None:
    rows = {(row.op, row.backend): row for row in m3_hw.capabilities()}
    assert len(rows) == len(m3_hw.capabilities()) == len(dispatch.specs()) * 4
    assert rows["rms_norm", "reference"].status == "available"
    assert (rows["rms_norm", "cpu"].status, rows["rms_norm", "cpu"].device_type) == ("available", "cpu")
    for backend, device in (("cuda", "cuda"), ("ascend", "npu")):
        row = rows["rms_norm", backend]
        assert (row.status, row.device_type, row.reasons) == ("missing", device, ("not written yet",))


def test_capabilities_of_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"ghost": Backend("ghost", "m3_hw_no_such_package")}
    monkeypatch.setattr(dispatch, "backends", lambda: known)
    row = next(row for row in m3_hw.capabilities() if (row.op, row.backend) == ("rms_norm", "ghost"))
    assert row.status == "unavailable"
    assert "m3_hw_no_such_package is not installed" in row.reasons[0]
