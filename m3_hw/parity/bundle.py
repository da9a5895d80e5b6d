"""Portable recordings of what a backend gave: two accelerators rarely meet in one process, and seldom in one machine.

`record` writes one file on the machine that has the device; `compare` judges two such files anywhere, without either
backend; `check` runs the recorded cases here. `docs/bundle-format.md` describes the file.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from m3_hw.contract import FP8
from m3_hw.dispatch import specs
from m3_hw.environment import environment
from m3_hw.errors import BackendUnavailableError, BundleError, ContractError
from m3_hw.parity.cases import DTYPES, TIERS, golden, make_call, run_case
from m3_hw.parity.checks import simulated
from m3_hw.parity.judge import Outputs, judge
from m3_hw.parity.metrics import Metrics, double_benchmark
from m3_hw.parity.results import Case, Report, Result, Status
from m3_hw.parity.run import Options, Progress, absence, listed_gap, missing_reasons
from m3_hw.spec import Call, OpSpec

FORMAT = "m3_hw.bundle"
VERSION = 1
FIRST_KEY = b'{"__metadata__"'
"""What a safetensors header with metadata starts with, behind its length in 8 bytes."""

BROKEN = (SafetensorError, ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What reading a damaged file may raise, here or in the libraries that parse it."""


@dataclass(frozen=True)
class Recorded:
    """A case that ran: the digest of its inputs, and its outputs."""

    case: Case
    inputs: str
    outputs: Outputs


@dataclass(frozen=True)
class Absent:
    """A case that gave nothing, and why: a known gap, or a failure."""

    case: Case
    status: Status
    message: str


@dataclass(frozen=True)
class Bundle:
    """What one backend gave for many cases, on one machine."""

    backend: str
    simulated: bool
    seed: int
    tiers: tuple[str, ...]
    created: str  # ISO 8601, UTC
    environment: dict[str, Any]
    cases: tuple[Recorded | Absent, ...]

    @property
    def made_by(self) -> str:
        """Version of m3_hw that recorded."""
        return f"m3-hw {self.environment.get('versions', {}).get('m3-hw') or 'of an unknown version'}"


def record(options: Options, backend: str, path: Path, *, progress: Progress | None = None) -> Path:
    """Run cases on a backend and write what it gave to one file, whole or not at all.

    Args:
        options: Which cases; `backends` and `checks` don't apply.
        backend: Who runs them.
        path: File to write, `.m3p` by custom; replaced if it exists.
        progress: Called after each case.

    Returns:
        The path.

    Raises:
        ContractError: The options name something unknown.
        BackendUnavailableError: The backend can't be used here.
        BundleError: No case ran, or the file can't be written.
    """
    cases = replace(options, backends=(backend,)).cases()
    bundle = collect(cases, backend, options.seed, progress=progress)
    if not any(isinstance(entry, Recorded) for entry in bundle.cases):
        reasons = "; ".join(dict.fromkeys(entry.message for entry in bundle.cases if isinstance(entry, Absent)))
        raise BundleError(f"nothing to record: no case ran on {backend} ({reasons or 'none has what is asked for'})")
    save(bundle, path)
    return path


def collect(cases: Iterable[Case], backend: str, seed: int, *, progress: Progress | None = None) -> Bundle:
    """Run cases on a backend.

    Args:
        cases: Their own backend doesn't matter.
        backend: Who runs them.
        seed: Of the inputs.
        progress: Called after each case.

    Returns:
        The bundle, in memory.

    Raises:
        BackendUnavailableError: The backend can't be used here.
    """
    if reasons := missing_reasons(backend):
        raise BackendUnavailableError(f"backend {backend!r} can't be used here: {'; '.join(reasons)}")
    wanted = list(dict.fromkeys(replace(case, backend=backend) for case in cases))
    entries = []
    for done, case in enumerate(wanted, 1):
        entries.append(entry := _run(case, seed))
        if progress:
            status, message = (entry.status, entry.message) if isinstance(entry, Absent) else ("pass", "")
            progress(Result(case, "record", status, message), done, len(wanted))
    return Bundle(
        backend=backend,
        simulated=simulated(backend),
        seed=seed,
        tiers=tuple(sorted({case.tier for case in wanted}, key=TIERS.index)),
        created=_now(),
        environment=environment(),
        cases=tuple(entries),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _run(case: Case, seed: int) -> Recorded | Absent:
    if missing := absence(case):
        return Absent(case, missing.status, missing.message)
    if gap := listed_gap(case, "parity"):
        return Absent(case, "gap", gap.reason)
    call = make_call(case, seed)
    try:
        return Recorded(case, digest_call(call), run_case(case, call))
    except Exception as error:  # noqa: BLE001, the boundary between the harness and what it tests
        return Absent(case, "fail", f"{type(error).__name__}: {error}")


# --- the file


def digest(tensor: Tensor) -> str:
    """sha256 of dtype, shape and bytes, row by row."""
    found = hashlib.sha256(f"{_dtype_name(tensor.dtype)} {list(tensor.shape)}\n".encode())
    found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def digest_call(call: Call) -> str:
    """sha256 of a call: every argument's name, and its tensor's dtype and digest, or its value."""
    values = {k: f"{_dtype_name(v.dtype)} {digest(_one_nan(v))}" if isinstance(v, Tensor) else repr(v) for k, v in call.items()}
    return hashlib.sha256("".join(f"{name}={value}\n" for name, value in values.items()).encode()).hexdigest()


def _one_nan(tensor: Tensor) -> Tensor:
    """The bits of a floating tensor with one NaN: which of them a conversion leaves differs between hosts."""
    if not tensor.is_floating_point():
        return tensor
    bits = tensor.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    return bits.masked_fill(tensor.double().isnan(), -1)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def save(bundle: Bundle, path: Path) -> None:
    """Write a bundle: beside the path first, then moved onto it, so that no reader ever finds half of one.

    Args:
        bundle: What to write.
        path: File to write; replaced if it exists.

    Raises:
        BundleError: The file can't be written.
    """
    recorded = [entry for entry in bundle.cases if isinstance(entry, Recorded)]
    tensors = {f"{entry.case.id}/{name}": _stored(tensor) for entry in recorded for name, tensor in entry.outputs.items()}
    manifest = json.dumps(_manifest(bundle))
    metadata = {"format": f"{FORMAT}/{VERSION}", "manifest": manifest, "sha256": hashlib.sha256(manifest.encode()).hexdigest()}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part, metadata)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        raise BundleError(f"{path} can't be written: {error}") from None
    finally:
        part.unlink(missing_ok=True)


def _stored(tensor: Tensor) -> Tensor:
    """fp8 as its bytes, since not every safetensors knows it."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype == FP8 else tensor.contiguous()


def _manifest(bundle: Bundle) -> dict[str, Any]:
    head = {key: getattr(bundle, key) for key in ("created", "environment", "backend", "simulated", "seed", "tiers")}
    return {**head, "cases": [_entry(entry) for entry in bundle.cases]}


def _entry(entry: Recorded | Absent) -> dict[str, Any]:
    case = asdict(entry.case)
    del case["backend"]
    if isinstance(entry, Absent):
        return {**case, "absent": {"status": entry.status, "message": entry.message}}
    outputs = {name: {"dtype": _dtype_name(tensor.dtype), "sha256": digest(tensor)} for name, tensor in entry.outputs.items()}
    return {**case, "inputs": entry.inputs, "outputs": outputs}


def load(path: Path) -> Bundle:
    """Read a bundle, and check every digest in it.

    Args:
        path: File that `record` wrote, here or elsewhere.

    Returns:
        The bundle, with its outputs on the CPU.

    Raises:
        BundleError: The file is missing, no bundle, truncated, altered, of a newer format, or of operators unknown here.
    """
    try:
        with path.open("rb") as raw:
            start = raw.read(64)
        size = path.stat().st_size
    except OSError as error:
        raise BundleError(f"{path} can't be read: {error.strerror}") from None
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            manifest = _read_manifest(path, file.metadata() or {})
            return _bundle(path, manifest, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118, it is no dict
    except BROKEN as error:
        raise BundleError(f"{path} {_what_is_wrong(start, size)} ({type(error).__name__}: {error})") from None


def _what_is_wrong(start: bytes, size: int) -> str:
    """Of a file that can't be parsed: whether it was a safetensors file once, by its first bytes."""
    length = int.from_bytes(start[:8], "little") + 8
    if not start[8:].startswith(FIRST_KEY):
        return f"is not a bundle, or cut off after {size} bytes" if size < 8 + len(FIRST_KEY) else "is not a bundle"
    return f"is truncated: it has {size} bytes, its header alone {length}" if size < length else "is truncated or damaged"


def _read_manifest(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    version = re.fullmatch(rf"{re.escape(FORMAT)}/(\d+)", metadata.get("format", ""))
    if not version:
        raise BundleError(f"{path} is not a bundle: its format is {metadata.get('format')!r}, wanted '{FORMAT}/{VERSION}'")
    if int(version[1]) != VERSION:
        raise BundleError(
            f"{path} has format {version[0]!r}; this version of m3-hw reads '{FORMAT}/{VERSION}': update m3-hw, or record again"
        )
    text = metadata["manifest"]
    if hashlib.sha256(text.encode()).hexdigest() != metadata["sha256"]:
        _damaged(path, "its manifest")
    manifest: dict[str, Any] = json.loads(text)
    return manifest


def _damaged(path: Path, what: str) -> NoReturn:
    raise BundleError(f"{path} is damaged: {what} does not have the digest that was recorded")


def _bundle(path: Path, manifest: dict[str, Any], tensors: dict[str, Tensor]) -> Bundle:
    backend = manifest["backend"]
    entries: list[Recorded | Absent] = []
    for found in manifest.pop("cases"):
        case = Case(found["op"], backend, found["dtype"], found["sample"], found["tier"])
        if case.op not in specs():
            raise BundleError(f"{path} holds operator {case.op!r}, which is unknown here; known: {', '.join(sorted(specs()))}")
        if case.dtype not in DTYPES:
            raise BundleError(f"{path} holds case {case.id!r} of dtype {case.dtype!r}, which is unknown here; known: {', '.join(DTYPES)}")
        if absent := found.get("absent"):
            entries.append(Absent(case, absent["status"], absent["message"]))
        else:
            outputs = {name: _output(path, tensors, f"{case.id}/{name}", about) for name, about in found["outputs"].items()}
            entries.append(Recorded(case, found["inputs"], outputs))
    if tensors:
        raise BundleError(f"{path} is damaged: its manifest does not know the tensor {min(tensors)!r}")
    manifest["tiers"] = tuple(manifest["tiers"])
    return Bundle(**manifest, cases=tuple(entries))


def _output(path: Path, tensors: dict[str, Tensor], name: str, about: dict[str, str]) -> Tensor:
    """Takes one output out of `tensors`, in its own dtype."""
    if name not in tensors:
        raise BundleError(f"{path} is damaged: output {name!r} is missing")
    tensor = tensors.pop(name)
    if about["dtype"] == _dtype_name(FP8):
        tensor = tensor.view(FP8)
    if digest(tensor) != about["sha256"]:
        _damaged(path, f"output {name!r}")
    return tensor


# --- judging


def compare(a: Bundle, b: Bundle, *, command: str = "", progress: Progress | None = None) -> Report:
    """Judge two recordings of the same cases, on the CPU; needs neither backend and no device.

    Each side is judged against the fp64 golden result by the spec's rule, which decides. How far b is from a, and
    Ascend's double benchmark (b's errors as multiples of a's, unless only a is Ascend's), are reported.

    Args:
        a: The recording that is the benchmark, such as a GPU's.
        b: The recording that is judged against it, such as an NPU's.
        command: What the report says it was made by.
        progress: Called after each result.

    Returns:
        The report: per case, a "parity" result of each side, and a "distance" result of the backend "a vs b".
        A case that only one side recorded has only the latter, which says why, and fails unless it is a known gap.

    Raises:
        BundleError: The recordings have different seeds or no case in common, or the inputs that are rebuilt here
            are not those that were recorded.
    """
    labels = ("first", "second")
    return _compare(a, b, _labels(a, b, labels), command, progress)


def check(bundle: Bundle, backend: str, *, command: str = "", progress: Progress | None = None) -> Report:
    """Run the recorded cases here, and compare with what was recorded there.

    Args:
        bundle: The recording that is the benchmark.
        backend: Who runs the cases here.
        command: What the report says it was made by.
        progress: Called after each case that runs, then after each result.

    Returns:
        The report, as `compare` gives it.

    Raises:
        BackendUnavailableError: The backend can't be used here.
        BundleError: As for `compare`.
    """
    try:
        here = collect((entry.case for entry in bundle.cases), backend, bundle.seed, progress=progress)
    except ContractError as error:
        raise BundleError(f"a case that {bundle.made_by} recorded can't be rebuilt here: {error}") from None
    return _compare(bundle, here, _labels(bundle, here, ("recorded", "here")), command, progress)


def _labels(a: Bundle, b: Bundle, distinctions: tuple[str, str]) -> tuple[str, str]:
    if a.backend != b.backend:
        return a.backend, b.backend
    return f"{a.backend} ({distinctions[0]})", f"{b.backend} ({distinctions[1]})"


def _compare(a: Bundle, b: Bundle, labels: tuple[str, str], command: str, progress: Progress | None) -> Report:
    if a.seed != b.seed:
        raise BundleError(f"the recordings have different inputs: seed {a.seed} of {labels[0]}, seed {b.seed} of {labels[1]}")
    sides = [{replace(entry.case, backend=""): entry for entry in bundle.cases} for bundle in (a, b)]
    if not any(isinstance(sides[1].get(case), Recorded) for case, entry in sides[0].items() if isinstance(entry, Recorded)):
        raise BundleError(f"the recordings of {labels[0]} and {labels[1]} have no case in common")
    report = Report(
        tier=",".join(tier for tier in TIERS if tier in a.tiers + b.tiers),
        seed=a.seed,
        created=_now(),
        command=command,
        environment={labels[0]: a.environment, labels[1]: b.environment, **environment()},
        simulated=[label for label, bundle in zip(labels, (a, b), strict=True) if bundle.simulated],
    )
    cases = sorted(sides[0].keys() | sides[1].keys())
    for done, case in enumerate(cases, 1):
        left, right = (side.get(case) for side in sides)
        if isinstance(left, Recorded) and isinstance(right, Recorded):
            results = _judged(left, right, labels, (a, b))
        else:
            results = [_one_sided(case, (left, right), labels)]
        report.results += results
        if progress:
            for result in results:
                progress(result, done, len(cases))
    return report


def _one_sided(case: Case, entries: tuple[Recorded | Absent | None, ...], labels: tuple[str, str]) -> Result:
    """A case that can't be compared: fails unless every side that lacks it calls it a known gap."""
    lacking = [(label, entry) for label, entry in zip(labels, entries, strict=True) if not isinstance(entry, Recorded)]
    message = "; ".join(f"{label}: {entry.message if entry else 'was not asked to record this case'}" for label, entry in lacking)
    known = all(entry is not None and entry.status == "gap" for _, entry in lacking)
    return Result(replace(case, backend=" vs ".join(labels)), "distance", "gap" if known else "fail", message)


def _judged(left: Recorded, right: Recorded, labels: tuple[str, str], bundles: tuple[Bundle, Bundle]) -> list[Result]:
    spec, dtype = specs()[left.case.op], DTYPES[left.case.dtype]
    call = _rebuilt(left, bundles[0])
    for entry, label, bundle in zip((left, right), labels, bundles, strict=True):
        if entry.inputs != digest_call(call):
            raise BundleError(
                f"{left.case.op}-{left.case.dtype}-{left.case.sample}: the inputs rebuilt here are not those that {label} ran on "
                f"(recorded by {bundle.made_by}); record again with the same version"
            )
    wanted = golden(spec, call)
    results = [_judged_alone(entry, label, spec, call, dtype, wanted) for entry, label in zip((left, right), labels, strict=True)]
    both = Result(replace(left.case, backend=" vs ".join(labels)), "distance", "pass")
    if failed := [result.case.backend for result in results if result.status == "fail"]:
        both.status, both.message = "fail", f"{' and '.join(failed)} failed against the golden result"
    if problem := _structure(right.outputs, left.outputs):
        both.status, both.message = "fail", f"{labels[1]} against {labels[0]}: {problem}"
    elif all(result.metrics for result in results) and not (failed and spec.scores):  # a wrong selection has no distance
        npu = 0 if labels[0].startswith("ascend") and not labels[1].startswith("ascend") else 1
        both.metrics = _distance(spec, call, dtype, (left.outputs, right.outputs), wanted, npu)
        levels = [f"{name} reaches {m['double_benchmark']['level']}" for name, m in both.metrics.items() if "double_benchmark" in m]
        both.note = f"double benchmark of {labels[npu]} against {labels[1 - npu]}: {', '.join(levels)}" if levels else ""
    return [*results, both]


def _judged_alone(entry: Recorded, label: str, spec: OpSpec[..., Any], call: Call, dtype: torch.dtype, wanted: Outputs) -> Result:
    case = replace(entry.case, backend=label)
    if problem := _structure(entry.outputs, wanted):
        return Result(case, "parity", "fail", problem)
    found = judge(spec, call, dtype, entry.outputs, wanted)
    return Result(case, "parity", "pass" if found.passed else "fail", found.message, metrics=found.metrics, tolerance=found.tolerance)


def _rebuilt(entry: Recorded, bundle: Bundle) -> Call:
    try:
        return make_call(entry.case, bundle.seed)
    except ContractError as error:
        raise BundleError(f"{entry.case.id}: recorded by {bundle.made_by}, can't be rebuilt here: {error}") from None


def _structure(actual: Outputs, wanted: Outputs) -> str:
    """What keeps two sets of outputs from being compared at all. A golden output is fp64 whatever the dtype is."""
    if actual.keys() != wanted.keys():
        return f"outputs are {sorted(actual)}; wanted: {sorted(wanted)}"
    for name, tensor in wanted.items():
        has = actual[name]
        same_kind = has.is_floating_point() if tensor.dtype == torch.float64 else has.dtype == tensor.dtype
        if has.shape != tensor.shape or not same_kind:
            return f"{name} is {_dtype_name(has.dtype)} {list(has.shape)}; wanted: {_dtype_name(tensor.dtype)} {list(tensor.shape)}"
    return ""


def _distance(
    spec: OpSpec[..., Any], call: Call, dtype: torch.dtype, sides: tuple[Outputs, Outputs], wanted: Outputs, npu: int
) -> dict[str, Metrics]:
    """By output, how far the second side is from the first, and the double benchmark of one side against the other."""
    first, second = sides
    exact = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in first.items()}
    metrics = judge(spec, call, dtype, second, exact).metrics
    for name, tensor in wanted.items():
        if tensor.is_floating_point() and tensor.numel():
            outputs = _comparable(spec, name, dtype, (sides[npu], sides[1 - npu], wanted))
            metrics[name]["double_benchmark"] = double_benchmark(*outputs)
    return metrics


def _comparable(spec: OpSpec[..., Any], name: str, dtype: torch.dtype, sides: tuple[Outputs, ...]) -> list[Tensor]:
    """One output of every side; what goes with selected ids only where all sides have the same ids in the same order."""
    found = [side[name] for side in sides]
    for other, ids in sides[0].items():
        if spec.tolerances[other][dtype].rule == "selection" and ids.shape == found[0].shape:
            same = torch.stack([(side[other] == ids).all(-1) for side in sides]).all(0)
            found = [tensor[same] for tensor in found]
    return found
