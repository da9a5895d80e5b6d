"""Run the benchmark: every line on its backend, beside its baseline and the ceilings of the same run."""

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

import m3_hw
from m3_hw.bench.ceilings import Ceilings, measure_ceilings
from m3_hw.bench.lines import BOTH, Benchmark, Inputs, Job, Target, benchmarks, forget_inputs
from m3_hw.bench.timing import QUICK, Effort, Run, graphed, measure, other_cores
from m3_hw.dispatch import backends, specs, use_backend
from m3_hw.environment import environment
from m3_hw.errors import ContractError, M3HWError
from m3_hw.parity.cases import DTYPES, accepted, device_of, known
from m3_hw.parity.checks import simulated

FORMAT = "m3_hw.bench/1"

DISPATCH = "dispatch"
"""Name of the line that measures what the public function adds to the backend's own."""


@dataclass
class Line:
    """What was measured. Times in seconds, memory in bytes over what the inputs take; None where it doesn't apply."""

    name: str
    op: str
    backend: str
    workload: str
    dtype: str
    note: str = ""
    seconds: float | None = None
    repeats: int = 0
    bytes: float | None = None
    operations: float | None = None
    share: float | None = None  # of the roofline: the least time by the ceilings / the time
    bound: str = ""  # what the roofline is made of here: "copy" or "matmul"
    peak_memory: int | None = None
    baseline: str = ""
    baseline_seconds: float | None = None
    ratio: float | None = None  # the baseline's time / the time
    targets: list[dict[str, Any]] = field(default_factory=list)
    other_cores: float = 0.0  # that other processes kept busy meanwhile
    error: str = ""


@dataclass
class Bench:
    """A whole run."""

    created: str  # ISO 8601, UTC
    command: str
    device: str
    quick: bool
    environment: dict[str, Any]
    ceilings: dict[str, dict[str, Any]]  # by device type: bytes and operations a second
    seconds: float = 0.0
    lines: list[Line] = field(default_factory=list)
    format: str = FORMAT

    def save(self, path: Path) -> None:
        """Write the run as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Bench":
        """Read a run that `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**data, "lines": [Line(**line) for line in data["lines"]]})


@dataclass(frozen=True)
class Choice:
    """What to measure; None: everything that can run here. `workloads` are parts of the workloads' names."""

    ops: tuple[str, ...] | None = None
    backends: tuple[str, ...] | None = None
    workloads: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    quick: bool = False


Progress = Callable[[Line, int, int], None]


def run(choice: Choice, *, command: str = "", progress: Progress | None = None) -> Bench:
    """Measure every line of a choice.

    Raises:
        ContractError: An unknown name, or no line that has what is asked for.
    """
    started = time.perf_counter()
    names = _backends(choice)
    todo = [(name, *line) for name in names for line in _lines(choice, torch.device(device_of(name)))]
    if not todo:
        raise ContractError("no line of the benchmark has what is asked for; `m3-hw bench --list` lists them")
    effort = QUICK if choice.quick else Effort()
    ceilings: dict[str, Ceilings] = {}
    found: list[Line] = []
    for number, (name, benchmark, dtype) in enumerate(todo, 1):
        device = torch.device(device_of(name))
        if device.type not in ceilings:
            ceilings[device.type] = measure_ceilings(device, list(BOTH), effort)
        line = _measure(name, benchmark, dtype, device, effort, ceilings[device.type])
        found.append(line)
        if progress:
            progress(line, number, len(todo))
    forget_inputs()
    devices = ", ".join(sorted({_device_name(torch.device(device)) for device in ceilings}))
    measured = {device: asdict(ceiling) for device, ceiling in ceilings.items()}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Bench(now, command, devices, choice.quick, environment(), measured, time.perf_counter() - started, found)


def line_names(choice: Choice) -> list[str]:
    """Names and dtypes of the lines of a choice."""
    return [f"{name}: {b.name}, {_name(dtype)}" for name in _backends(choice) for b, dtype in _lines(choice, torch.device(device_of(name)))]


def _backends(choice: Choice) -> list[str]:
    """The backends of a choice; without one, those that can run here. What a simulated one takes means nothing."""
    names = accepted("backend", choice.backends, known(), default=[n for n, b in backends().items() if not b.unavailable_reasons()])
    if choice.backends is None:
        return [name for name in names if not simulated(name)]
    for name in names:
        if simulated(name):
            raise ContractError(f"backend has {name!r}, simulated here; accepted: backends on their own hardware")
    return names


def _lines(choice: Choice, device: torch.device) -> list[tuple[Benchmark, torch.dtype]]:
    """Benchmarks and dtypes of a choice, on one device."""
    ops = set(accepted("op", choice.ops, [*specs(), DISPATCH]))
    dtypes = [DTYPES[name] for name in accepted("dtype", choice.dtypes, DTYPES)]
    everything = [*benchmarks(device, quick=choice.quick), _dispatch_benchmark()]
    return [
        (benchmark, dtype)
        for benchmark in everything
        for dtype in benchmark.dtypes
        if ops.issuperset(benchmark.ops) and dtype in dtypes and _has_part(benchmark.workload, choice.workloads)
    ]


def _has_part(workload: str, parts: Sequence[str] | None) -> bool:
    return parts is None or any(part in workload for part in parts)


def _measure(backend: str, benchmark: Benchmark, dtype: torch.dtype, device: torch.device, effort: Effort, ceilings: Ceilings) -> Line:
    """One line; a backend that can't run it gives the reason instead of times."""
    line = Line(benchmark.name, "+".join(benchmark.ops), backend, benchmark.workload, _name(dtype), benchmark.note)
    gc.collect()
    try:
        with other_cores() as others:
            if benchmark.ops == (DISPATCH,):
                line.seconds, line.repeats = _dispatch_overhead(backend, device, effort)
            else:
                _fill(line, benchmark, benchmark.make(Inputs.on(dtype, device)), device, effort, ceilings)
        line.other_cores = others()
    except M3HWError as error:
        line.error = str(error)
    line.targets = [_judge(line, target) for target in benchmark.targets]
    return line


def _fill(line: Line, benchmark: Benchmark, job: Job, device: torch.device, effort: Effort, ceilings: Ceilings) -> None:
    def prepared(run: Run) -> Run:
        return graphed(run) if benchmark.graph and device.type == "cuda" else run

    with use_backend(line.backend), torch.inference_mode():
        timing = measure(prepared(job.run), device, effort)
        line.seconds, line.repeats, line.peak_memory = timing.median, len(timing.seconds), timing.peak_memory
        line.bytes, line.operations = job.cost.bytes, job.cost.operations
        precision = job.cost.dtype if job.cost.dtype in ceilings.matmul else line.dtype
        floor = ceilings.floor_seconds(job.cost.bytes, job.cost.operations, precision)
        line.share = floor / timing.median
        line.bound = "copy" if floor == job.cost.bytes / ceilings.copy else "matmul"
        baseline = job.baseline()
        line.baseline, line.baseline_seconds = baseline.name, measure(prepared(baseline.run), device, effort).median
        line.ratio = line.baseline_seconds / timing.median


def _judge(line: Line, target: Target) -> dict[str, Any]:
    value = getattr(line, target.metric)
    met = value is not None and (value >= target.limit if target.at_least else value <= target.limit)
    return {**asdict(target), "value": value, "met": met}


def _dispatch_benchmark() -> Benchmark:
    """Made elsewhere than the others: it compares two functions, not a call with a baseline."""

    def make(inputs: Inputs) -> Job:
        raise NotImplementedError

    target = Target("seconds", 10e-6, at_least=False)
    return Benchmark(
        "dispatch overhead, eager", (DISPATCH,), "rms_norm, 1 x 64", make, note="public function - backend's", targets=(target,)
    )


def _dispatch_overhead(backend: str, device: torch.device, effort: Effort) -> tuple[float, int]:
    """Seconds that a call of the public rms_norm takes over a call of the backend's function, medians of batches."""
    spec = specs()["rms_norm"]
    inputs = Inputs.on(torch.bfloat16, device)
    x, weight = inputs.values(1, 64), inputs.values(64)
    direct = spec.reference if backend == "reference" else backends()[backend].load(spec).function
    calls, batches = (20, 3) if effort is QUICK else (200, 101)
    with use_backend(backend), torch.inference_mode():
        times = [(_batch_seconds(m3_hw.rms_norm, calls, x, weight), _batch_seconds(direct, calls, x, weight)) for _ in range(batches)]
    return median(public - own for public, own in times) / calls, calls * batches


def _batch_seconds(function: Callable[..., Any], calls: int, *tensors: torch.Tensor) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function(*tensors, 1e-6)
    return time.perf_counter() - start


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{environment()['system']['cpu']}, {threads} thread{'s' * (threads != 1)}"
    return str(torch.get_device_module(device).get_device_name())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
