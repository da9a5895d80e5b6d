"""MiniMax-M3's published production shapes, as data: prefill calls with their weights, and the decode grid.

Source: MiniMax-AI/MSA (MIT), `datas/inference/prefill_benchmark_cases_v1.json` (the batch-1 representative cases)
and its README's decode grid; the JSON files beside this one say so too.
"""

import functools
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Workload:
    """One call of the attention path: requests with the same number of queries, keys around one length."""

    name: str
    batch: int
    num_queries: int  # a request
    kv_len: int  # keys a request, these queries included
    weight: int = 1  # production calls that it stands for


def _load(name: str) -> Any:
    return json.loads((files("m3_hw.data") / f"{name}.json").read_text(encoding="utf-8"))


@functools.cache
def prefill() -> tuple[Workload, ...]:
    """The 16 production prefill shapes."""
    return tuple(
        Workload(f"prefill_{c['name'].replace('/', '_')}", 1, c["query_len"], c["kv_len"], c["weight"])
        for c in _load("m3_prefill")["cases"]
    )


@functools.cache
def decode() -> tuple[Workload, ...]:
    """The decode grid: batch x key length, 8 tokens a request (1 and 7 drafted); with 1 for low latency."""
    data = _load("m3_decode")
    grids = (("decode", data), ("decode_low_latency", data["low_latency"]))
    return tuple(
        Workload(f"{kind}_b{batch}_k{kv_len}", batch, grid["queries_per_request"], kv_len)
        for kind, grid in grids
        for batch in grid["batch"]
        for kv_len in grid["kv_len"]
    )


@dataclass(frozen=True)
class ScaledWorkload(Workload):
    """A workload cut down to what a CPU's fp64 reference can hold; `note` says from what."""

    note: str = ""


def scaled_for_cpu(workload: Workload, *, max_queries: int = 32, max_keys: int = 2**17) -> ScaledWorkload:
    """At most `max_queries` queries and `max_keys` keys a call: fewer requests first, then fewer queries each."""
    kv_len = min(workload.kv_len, max_keys)
    batch = max(1, min(workload.batch, max_keys // kv_len, max_queries // workload.num_queries))
    num_queries = min(workload.num_queries, max_queries // batch)
    cuts = [
        f"{name} {was} -> {now}"
        for name, was, now in (
            ("requests", workload.batch, batch),
            ("queries a request", workload.num_queries, num_queries),
            ("keys a request", workload.kv_len, kv_len),
        )
        if was != now
    ]
    note = "scaled down: " + ", ".join(cuts) if cuts else ""
    return ScaledWorkload(workload.name, batch, num_queries, kv_len, workload.weight, note)


def for_parity() -> tuple[Workload, ...]:
    """The production shapes of parity's model tier: every prefill shape, and the smallest batch of each decode length."""
    smallest: dict[tuple[str, int], Workload] = {}
    for workload in decode():
        smallest.setdefault((workload.name.split("_b")[0], workload.kv_len), workload)
    return (*prefill(), *smallest.values())
