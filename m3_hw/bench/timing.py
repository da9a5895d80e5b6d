"""Medians and peak memory of a callable, on any device."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psutil
import torch

Run = Callable[[], Any]

FLUSH_BYTES = 2**28
"""Written before each timed call on an accelerator: more than any last-level cache."""

SAMPLE_SECONDS = 0.002


@dataclass(frozen=True)
class Effort:
    """How long to measure: at least `min_seconds` and `min_repeats`, at most `max_repeats`.

    A first call of `long_seconds` or more stands for itself: what warming up would take off it is below the noise.
    """

    min_seconds: float = 0.4
    min_repeats: int = 3
    max_repeats: int = 200
    long_seconds: float = 4.0


QUICK = Effort(min_seconds=0.0, min_repeats=1, max_repeats=1)


@dataclass
class Timing:
    """Seconds of the repeats, and the most memory that the first call held over what there was before it."""

    seconds: list[float] = field(default_factory=list)
    peak_memory: int = 0

    @property
    def median(self) -> float:
        """Median seconds."""
        return median(self.seconds)


def measure(run: Run, device: torch.device, effort: Effort) -> Timing:
    """Time a callable; the first call warms up and is watched for its memory.

    Args:
        run: Called without arguments; what it returns is dropped after the call.
        device: Where it runs: decides how it is timed.
        effort: How long to measure.
    """
    clock = _wall_clock if device.type == "cpu" else _event_clock(device)
    with peak_memory(device) as memory:
        first = _wall_clock(run) if device.type == "cpu" else clock(run)
    timing = Timing(peak_memory=memory())
    if first >= effort.long_seconds:
        timing.seconds.append(first)
        return timing
    while len(timing.seconds) < effort.max_repeats:
        timing.seconds.append(clock(run))
        if len(timing.seconds) >= effort.min_repeats and sum(timing.seconds) >= effort.min_seconds:
            break
    return timing


def _wall_clock(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _event_clock(device: torch.device) -> Callable[[Run], float]:
    """Times with the device's events, after flushing its cache: the flush also hides the launch."""
    module = torch.get_device_module(device)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def clock(run: Run) -> float:
        start, end = (module.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        run()
        end.record()
        module.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return clock


@contextmanager
def other_cores() -> Iterator[Callable[[], float]]:
    """Cores that other processes kept busy inside: ask the yielded function after. Beside them, CPU times mean little."""
    start, before, own = time.perf_counter(), _busy_seconds(), time.process_time()

    def used() -> float:
        others = (_busy_seconds() - before) - (time.process_time() - own)
        return max(0.0, others / (time.perf_counter() - start))

    yield used


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))


def graphed(run: Run) -> Run:
    """The replay of a CUDA graph of the callable."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a first call allocates or compiles must not happen during capture
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """The most memory that was held inside over what was held at the start, in bytes: ask the yielded function after.

    On the CPU it is the process's resident memory, sampled by a thread; elsewhere the allocator's own count.
    """
    gc.collect()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        yield lambda: int(module.max_memory_allocated()) - before
        return
    process, stop = psutil.Process(), threading.Event()
    before = most = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not stop.wait(SAMPLE_SECONDS):
            most = max(most, process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: max(0, most - before)
    finally:
        stop.set()
        thread.join()
