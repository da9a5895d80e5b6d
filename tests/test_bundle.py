"""Recordings: what is written is what is read, damage never goes unnoticed, and two sides are judged without a device."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from m3_hw.dispatch import specs
from m3_hw.draw import Draw
from m3_hw.errors import BackendUnavailableError, BundleError, ContractError
from m3_hw.parity import bundle as module
from m3_hw.parity.bundle import Absent, Bundle, Recorded, check, collect, compare, digest, digest_call, load, record, save
from m3_hw.parity.cases import make_call
from m3_hw.parity.report import rows
from m3_hw.parity.results import Case
from m3_hw.parity.run import Options

OPTIONS = Options(ops=("rms_norm", "route_tokens", "permute_tokens"), dtypes=("float32", "bfloat16"))


@pytest.fixture(scope="module")
def recorded() -> Bundle:
    """What the reference gives; tests change copies of it."""
    return collect(OPTIONS.cases(), "reference", 3)


@pytest.fixture
def file(recorded: Bundle, tmp_path: Path) -> Path:
    small = [e for e in recorded.cases if e.case.op == "rms_norm" and e.case.dtype == "bfloat16"]
    save(replace(recorded, cases=tuple(small)), tmp_path / "small.m3p")
    return tmp_path / "small.m3p"


def named(bundle: Bundle, backend: str, **changes) -> Bundle:
    """The bundle as if another backend had recorded it."""
    return replace(bundle, backend=backend, cases=tuple(replace(e, case=replace(e.case, backend=backend)) for e in bundle.cases), **changes)


def with_output(bundle: Bundle, op: str, sample: str, dtype: str, **outputs) -> Bundle:
    """The bundle with some outputs of one case passed through functions."""

    def changed(entry):
        if (entry.case.op, entry.case.sample, entry.case.dtype) != (op, sample, dtype):
            return entry
        return replace(entry, outputs={k: outputs.get(k, lambda t: t)(t.clone()) for k, t in entry.outputs.items()})

    found = tuple(changed(entry) for entry in bundle.cases)
    assert any(new is not old for new, old in zip(found, bundle.cases, strict=True))
    return replace(bundle, cases=found)


def equal(a: Bundle, b: Bundle) -> bool:
    def plain(bundle: Bundle):
        entries = [(e.case, e.inputs, {k: digest(t) for k, t in e.outputs.items()}) if isinstance(e, Recorded) else e for e in bundle.cases]
        return replace(bundle, cases=()), entries

    return plain(a) == plain(b)


def rewritten(file: Path, change) -> None:
    """Write the file again with its metadata passed through a function, tensors as they are."""
    with safe_open(file, framework="pt") as opened:
        metadata, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(metadata, tensors)
    save_file(tensors, file, metadata)


# --- the file


def test_what_is_written_is_what_is_read(recorded: Bundle, tmp_path: Path):
    save(recorded, tmp_path / "x.m3p")
    assert equal(load(tmp_path / "x.m3p"), recorded)


def test_record_writes_what_the_backend_gives(tmp_path: Path):
    calls = []
    options = Options(ops=("rms_norm",), samples=("rows", "empty"), seed=9)
    path = record(options, "reference", tmp_path / "x.m3p", progress=lambda *found: calls.append(found))
    bundle = load(path)
    assert (bundle.backend, bundle.simulated, bundle.seed, bundle.tiers) == ("reference", False, 9, ("small",))
    assert [entry.case.sample for entry in bundle.cases] == ["empty", "rows"] * 3
    assert [(done, total) for _, done, total in calls] == [(i, 6) for i in range(1, 7)]
    for entry in bundle.cases:
        assert isinstance(entry, Recorded)
        call = make_call(entry.case, 9)
        assert entry.inputs == digest_call(call)
        assert torch.equal(entry.outputs["y"], specs()["rms_norm"].reference(**call))


@pytest.mark.parametrize(
    "values", [torch.arange(256, dtype=torch.uint8), torch.zeros(0, 3, dtype=torch.uint8)], ids=["every_byte", "empty"]
)
def test_fp8_travels_as_bytes_and_comes_back_as_fp8(recorded: Bundle, tmp_path: Path, values):
    tensor = values.view(torch.float8_e4m3fn)
    entry = replace(recorded.cases[0], outputs={"y": tensor, "scalar": torch.tensor(2.5), "flags": torch.tensor([True, False])})
    save(replace(recorded, cases=(entry,)), tmp_path / "x.m3p")
    with safe_open(tmp_path / "x.m3p", framework="pt") as opened:
        assert opened.get_tensor(f"{entry.case.id}/y").dtype == torch.uint8
    (read,) = load(tmp_path / "x.m3p").cases
    assert isinstance(read, Recorded)
    assert read.outputs["y"].dtype == torch.float8_e4m3fn
    assert torch.equal(read.outputs["y"].view(torch.uint8), values)
    assert read.outputs["scalar"].shape == ()
    assert read.outputs["flags"].tolist() == [True, False]


def test_strided_outputs_are_stored_by_value(recorded: Bundle, tmp_path: Path):
    entry = replace(recorded.cases[0], outputs={"y": torch.arange(6.0).reshape(2, 3).t(), "z": torch.ones(1).expand(4)})
    save(replace(recorded, cases=(entry,)), tmp_path / "x.m3p")
    (read,) = load(tmp_path / "x.m3p").cases
    assert isinstance(read, Recorded)
    assert read.outputs["y"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert read.outputs["z"].tolist() == [1, 1, 1, 1]


def test_manifest_is_what_the_format_says(file: Path):
    with safe_open(file, framework="pt") as opened:
        metadata, names = opened.metadata(), set(opened.keys())
    assert metadata["format"] == "m3_hw.bundle/1"
    manifest = json.loads(metadata["manifest"])
    assert manifest.keys() == {"created", "environment", "backend", "simulated", "seed", "tiers", "cases"}
    for case in manifest["cases"]:
        assert case.keys() == {"op", "dtype", "sample", "tier", "inputs", "outputs"}
        assert f"rms_norm-reference-bfloat16-{case['sample']}/y" in names
        assert case["outputs"]["y"].keys() == {"dtype", "sha256"}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(recorded: Bundle, file: Path, monkeypatch):
    before = file.read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(recorded, file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_a_folder_that_is_not_there_is_a_bundle_error(recorded: Bundle, tmp_path: Path):
    with pytest.raises(BundleError, match="can't be written"):
        save(recorded, tmp_path / "missing" / "x.m3p")


# --- damage


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read: No such file"),
        (b"", "is not a bundle, or cut off after 0 bytes"),
        (b"hello", "is not a bundle"),
        (b"PK\x03\x04" + b"\x00" * 200, "is not a bundle"),
        (b"\xff" * 300, "is not a bundle"),
        (b"{}" * 200, "is not a bundle"),
    ],
    ids=["missing", "empty", "text", "zip", "ones", "json"],
)
def test_what_is_no_bundle_is_refused(tmp_path: Path, content, message):
    path = tmp_path / "x.m3p"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BundleError, match=message):
        load(path)


def test_a_folder_is_refused(tmp_path: Path):
    with pytest.raises(BundleError, match="can't be read"):
        load(tmp_path)


def test_other_safetensors_are_refused(tmp_path: Path):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BundleError, match="is not a bundle: its format is 'pt'"):
        load(tmp_path / "model.safetensors")
    save_file({"weight": torch.ones(2)}, tmp_path / "bare.safetensors")
    with pytest.raises(BundleError, match="is not a bundle"):
        load(tmp_path / "bare.safetensors")


def test_every_truncation_is_refused(file: Path):
    whole = file.read_bytes()
    for size in {*range(0, len(whole), 97), len(whole) - 1, 7, 8, 9, 22, 23}:
        file.write_bytes(whole[:size])
        with pytest.raises(BundleError, match=r"truncated|cut off"):
            load(file)


def test_bytes_behind_the_end_are_refused(file: Path):
    file.write_bytes(file.read_bytes() + b"\0" * 8)
    with pytest.raises(BundleError, match="damaged"):
        load(file)


def test_every_flipped_bit_is_refused_or_harmless(file: Path):
    """Harmless: white space between the header's tokens. Whatever is read is what was written."""
    whole, original = bytearray(file.read_bytes()), load(file)
    refused = 0
    positions = [*range(0, len(whole), 41), *range(120)]
    for position in positions:
        whole[position] ^= 1 << position % 8
        file.write_bytes(whole)
        try:
            assert equal(load(file), original), position
        except BundleError:
            refused += 1
        whole[position] ^= 1 << position % 8
    assert refused > 0.95 * len(positions)


def test_a_flipped_bit_in_an_output_is_named(file: Path):
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)
    with pytest.raises(BundleError, match=r"damaged: output 'rms_norm-reference-bfloat16-\w+/y' does not have the digest"):
        load(file)


def test_an_altered_manifest_is_refused(file: Path):
    rewritten(file, lambda metadata, _: metadata.update(manifest=metadata["manifest"].replace('"seed": 3', '"seed": 4')))
    with pytest.raises(BundleError, match="damaged: its manifest"):
        load(file)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tensors: tensors.pop(min(tensors)), "output .* is missing"),
        (lambda tensors: tensors.update(foreign=torch.ones(1)), "does not know the tensor 'foreign'"),
        (lambda tensors: tensors.update({min(tensors): torch.ones(2, dtype=torch.bfloat16)}), "digest"),
    ],
    ids=["missing", "foreign", "other_shape"],
)
def test_tensors_that_the_manifest_does_not_describe_are_refused(file: Path, spoil, message):
    rewritten(file, lambda _, tensors: spoil(tensors))
    with pytest.raises(BundleError, match=message):
        load(file)


def test_a_newer_format_is_refused_by_name(file: Path):
    rewritten(file, lambda metadata, _: metadata.update(format="m3_hw.bundle/2"))
    with pytest.raises(BundleError, match=r"format 'm3_hw.bundle/2'.*reads 'm3_hw.bundle/1'"):
        load(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"op": "flux_capacitor"}, "operator 'flux_capacitor', which is unknown here"), ({"dtype": "int4"}, "dtype 'int4'")],
)
def test_foreign_operators_and_dtypes_are_refused_by_name(recorded: Bundle, tmp_path: Path, changes, message):
    entry = recorded.cases[0]
    save(replace(recorded, cases=(replace(entry, case=replace(entry.case, **changes)),)), tmp_path / "x.m3p")
    with pytest.raises(BundleError, match=message):
        load(tmp_path / "x.m3p")


# --- digests


def test_digest_sees_dtype_shape_and_every_bit():
    zeros = torch.zeros(2, 3)
    found = [digest(t) for t in (zeros, zeros.reshape(3, 2), zeros.int(), -zeros, zeros[0], torch.zeros(()), torch.zeros(0))]
    assert len(set(found)) == len(found)
    assert digest(torch.arange(6).reshape(2, 3).t()) == digest(torch.tensor([[0, 3], [1, 4], [2, 5]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_calls_that_differ_only_in_which_nan_have_one_digest(dtype):
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    negative = torch.tensor([-1 if dtype.itemsize > 1 else 255, 0]).to(integers)
    positive = negative.clone()
    positive[0] = torch.iinfo(integers).max if dtype.itemsize > 1 else 127
    assert negative.view(dtype)[0].isnan()
    assert positive.view(dtype)[0].isnan()
    assert digest_call({"x": negative.view(dtype)}) == digest_call({"x": positive.view(dtype)})
    assert digest_call({"x": negative.view(dtype)}) != digest_call({"x": negative.flip(0).view(dtype)})


def test_calls_differ_by_names_scalars_and_missing_tensors():
    x = Draw(1).values((2, 2), torch.float32)
    calls = [{"x": x}, {"y": x}, {"x": x, "eps": 1e-6}, {"x": x, "eps": 1e-5}, {"x": x, "eps": None}, {"x": x.bfloat16()}, {"x": x + 1}]
    assert len({digest_call(call) for call in calls}) == len(calls)


# --- comparing


def test_equal_recordings_pass_on_every_row(recorded: Bundle):
    report = compare(named(recorded, "cuda"), named(recorded, "ascend", simulated=True), command="m3-hw parity compare a b")
    assert report.passed
    assert report.simulated == ["ascend"]
    assert report.command == "m3-hw parity compare a b"
    assert {row.backend for row in rows(report)} == {"cuda", "ascend", "cuda vs ascend"}
    assert {row.backend for row in rows(report) if row.simulated} == {"ascend", "cuda vs ascend"}
    assert len(report.results) == 3 * len(recorded.cases)
    assert report.environment["cuda"] == recorded.environment


def test_compare_needs_no_backend(recorded: Bundle, monkeypatch):
    def asked(*_):
        raise AssertionError("a backend was asked for")

    for place in ("dispatch.backends", "parity.cases.known_backends", "parity.run.backends", "parity.checks.backends"):
        monkeypatch.setattr(f"m3_hw.{place}", asked)
    assert compare(named(recorded, "cuda"), named(recorded, "ascend")).passed


def test_a_wrong_scale_on_one_side_fails_there_with_numbers(recorded: Bundle):
    wrong = with_output(named(recorded, "ascend"), "rms_norm", "rows", "float32", y=lambda y: y * 8)
    report = compare(named(recorded, "cuda"), wrong)
    failed = [result for result in report.results if result.status == "fail"]
    assert [result.case.id for result in failed] == ["rms_norm-ascend-float32-rows", "rms_norm-cuda vs ascend-float32-rows"]
    assert failed[0].metrics["y"]["rel_l2"] == pytest.approx(7, rel=1e-3)
    assert failed[1].message == "ascend failed against the golden result"
    assert failed[1].metrics["y"]["rel_l2"] == pytest.approx(7, rel=1e-3)
    assert failed[1].metrics["y"]["double_benchmark"]["level"] == "none"


def test_double_benchmark_divides_the_npus_errors_by_the_gpus(recorded: Bundle):
    """Whichever side is ascend is the judged one; else the second."""

    def nudged(backend: str, share: float) -> Bundle:
        return with_output(named(recorded, backend), "rms_norm", "rows", "float32", y=lambda y: y * (1 + share))

    def benchmark(a: Bundle, b: Bundle):
        case = Case("rms_norm", f"{a.backend} vs {b.backend}", "float32", "rows")
        (result,) = (r for r in compare(a, b).results if r.case == case)
        return result.metrics["y"]["double_benchmark"], result.note

    gpu, npu = nudged("cuda", 1e-4), nudged("ascend", 4e-4)
    for a, b in ((gpu, npu), (npu, gpu)):
        found, note = benchmark(a, b)
        assert found["mere"]["ratio"] == pytest.approx(4, rel=1e-2)
        assert found["level"] == "none"
        assert note == "double benchmark of ascend against cuda: y reaches none"
    found, note = benchmark(nudged("cpu", 4e-4), nudged("cuda", 2.8e-4))
    assert found["mere"]["ratio"] == pytest.approx(0.7, rel=1e-2)
    assert note == "double benchmark of cuda against cpu: y reaches L2"


def test_near_ties_between_the_sides_are_no_failures(recorded: Bundle):
    """Swapped ids of scores nearer than the margin: the weights that go with them are compared id by id."""

    def swapped(t):
        t[:, [0, 1]] = t[:, [1, 0]]
        return t

    other = with_output(named(recorded, "ascend"), "route_tokens", "near_ties", "float32", ids=swapped, weights=swapped)
    report = compare(named(recorded, "cuda"), other)
    (result,) = (r for r in report.results if r.case.id == "route_tokens-cuda vs ascend-float32-near_ties")
    assert "weights" in result.metrics
    assert result.metrics["weights"]["double_benchmark"]["level"] == "L2"


def test_ids_out_of_range_on_the_first_side_are_a_failure_not_a_crash(recorded: Bundle):
    wrong = with_output(named(recorded, "cuda"), "route_tokens", "rows", "float32", ids=lambda ids: ids + 1000)
    report = compare(wrong, named(recorded, "ascend"))
    assert {r.case.id for r in report.results if r.status == "fail"} == {
        "route_tokens-cuda-float32-rows",
        "route_tokens-cuda vs ascend-float32-rows",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda y: y[1:], r"y is bfloat16 \[4, 96\]; wanted: float64 \[5, 96\]"), (lambda y: y.int(), r"y is int32 \[5, 96\]")],
    ids=["shape", "integers"],
)
def test_outputs_of_another_kind_are_a_failure_not_a_crash(recorded: Bundle, change, message):
    wrong = with_output(named(recorded, "ascend"), "rms_norm", "rows", "bfloat16", y=change)
    failed = [r for r in compare(named(recorded, "cuda"), wrong).results if r.status == "fail"]
    assert [r.case.backend for r in failed] == ["ascend", "cuda vs ascend"]
    assert re.match(message, failed[0].message)


def test_another_dtype_on_one_side_fails_the_comparison(recorded: Bundle):
    """And against the golden result, which is judged in the dtype that the side has: bf16's roundings are no fp32 result."""
    other = with_output(named(recorded, "ascend"), "rms_norm", "rows", "bfloat16", y=lambda y: y.float())
    failed = [r for r in compare(named(recorded, "cuda"), other).results if r.status == "fail"]
    assert [r.case.backend for r in failed] == ["ascend", "cuda vs ascend"]
    assert failed[1].message == "ascend against cuda: y is float32 [5, 96]; wanted: bfloat16 [5, 96]"


def test_two_recordings_of_one_backend_are_told_apart(recorded: Bundle):
    backends = {row.backend for row in rows(compare(recorded, replace(recorded, simulated=True)))}
    assert backends == {"reference (first)", "reference (second)", "reference (first) vs reference (second)"}


def test_inputs_that_are_not_those_recorded_are_refused_by_case(recorded: Bundle):
    entries = [replace(e, inputs="0" * 64) if e.case.sample == "odd" and e.case.op == "rms_norm" else e for e in recorded.cases]
    altered = named(replace(recorded, cases=tuple(entries)), "ascend")
    with pytest.raises(BundleError, match="rms_norm-bfloat16-odd: the inputs rebuilt here are not those that ascend ran on"):
        compare(named(recorded, "cuda"), altered)


def test_a_sample_of_another_version_is_refused_by_case(recorded: Bundle):
    entry = recorded.cases[0]
    strange = replace(recorded, cases=(replace(entry, case=replace(entry.case, sample="from_the_future")),))
    with pytest.raises(BundleError, match=r"from_the_future.*can't be rebuilt here"):
        compare(named(strange, "cuda"), named(strange, "ascend"))
    with pytest.raises(BundleError, match="can't be rebuilt here"):
        check(strange, "reference")


def test_other_seeds_and_nothing_in_common_are_refused(recorded: Bundle):
    with pytest.raises(BundleError, match="seed 3 of cuda, seed 4 of ascend"):
        compare(named(recorded, "cuda"), named(recorded, "ascend", seed=4))
    halves = [replace(recorded, cases=tuple(e for e in recorded.cases if (e.case.op == "rms_norm") == norm)) for norm in (True, False)]
    with pytest.raises(BundleError, match="no case in common"):
        compare(named(halves[0], "cuda"), named(halves[1], "ascend"))


def test_cases_of_only_one_side_are_listed_with_the_reason(recorded: Bundle):
    first, second, third, *rest = named(recorded, "ascend").cases
    partial = named(
        replace(recorded, cases=(Absent(first.case, "gap", "not written yet"), Absent(second.case, "fail", "RuntimeError: boom"), *rest)),
        "ascend",
    )
    report = compare(named(recorded, "cuda"), partial)
    found = {
        r.case.sample: (r.status, r.message) for r in report.results if r.case.op == first.case.op and r.case.dtype == first.case.dtype
    }
    assert found[first.case.sample] == ("gap", "ascend: not written yet")
    assert found[second.case.sample] == ("fail", "ascend: RuntimeError: boom")
    assert found[third.case.sample] == ("fail", "ascend: was not asked to record this case")


# --- running


def test_check_runs_the_recorded_cases_here(recorded: Bundle):
    few = replace(recorded, cases=tuple(e for e in recorded.cases if e.case.op == "rms_norm"))
    report = check(few, "cpu", command="m3-hw parity check")
    assert report.passed
    assert (report.seed, report.command) == (3, "m3-hw parity check")
    assert {row.backend for row in rows(report)} == {"reference", "cpu", "reference vs cpu"}
    assert {row.backend for row in rows(check(few, "reference"))} >= {"reference (recorded)", "reference (here)"}


def test_what_a_backend_cannot_run_is_recorded_with_its_reason(monkeypatch):
    def broken(case, call):
        raise RuntimeError("error code is 161002")

    monkeypatch.setattr(module, "run_case", broken)
    bundle = collect([Case("rms_norm", "cpu", "float32", "rows")], "reference", 0)
    assert bundle.cases == (Absent(Case("rms_norm", "reference", "float32", "rows"), "fail", "RuntimeError: error code is 161002"),)


def test_nothing_recorded_is_an_error_and_leaves_no_file(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "run_case", lambda case, call: 1 / 0)
    with pytest.raises(BundleError, match=r"no case ran on reference .*ZeroDivisionError"):
        record(Options(ops=("rms_norm",)), "reference", tmp_path / "x.m3p")
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_backend_is_refused_with_every_reason(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "missing_reasons", lambda backend: ["no device", "no driver"])
    with pytest.raises(BackendUnavailableError, match="no device; no driver"):
        record(Options(ops=("rms_norm",)), "cpu", tmp_path / "x.m3p")


def test_an_unknown_backend_is_refused(tmp_path: Path):
    with pytest.raises(ContractError, match="backend has 'rocm'"):
        record(OPTIONS, "rocm", tmp_path / "x.m3p")
