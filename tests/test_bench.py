"""The benchmark: every line is there, its numbers mean what they say, its baselines do the operators' work."""

import json
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import m3_hw
from m3_hw.bench import report
from m3_hw.bench.baselines import baseline
from m3_hw.bench.ceilings import Ceilings, measure_ceilings
from m3_hw.bench.costs import cost
from m3_hw.bench.lines import Inputs, benchmarks
from m3_hw.bench.run import Bench, Choice, Line, line_names, run
from m3_hw.bench.timing import QUICK, Effort, measure, other_cores, peak_memory
from m3_hw.cli import app
from m3_hw.contract import PAGE_SIZE
from m3_hw.dispatch import specs
from m3_hw.draw import Draw
from m3_hw.errors import ContractError
from m3_hw.paged import attention_call

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def quick() -> Bench:
    return run(Choice(backends=("cpu",), quick=True), command="m3-hw bench --quick")


# lines


def test_every_operator_has_a_line_that_ran(quick: Bench):
    ran = {op for line in quick.lines if not line.error for op in line.op.split("+")}
    assert ran == {*specs(), "dispatch"}


def test_every_line_has_its_numbers(quick: Bench):
    for line in quick.lines:
        assert line.error == ""
        assert line.seconds is not None
        assert line.repeats >= 1
        if line.op != "dispatch":
            assert line.bytes is not None
            assert line.bytes > 0
            assert line.share is not None
            assert line.share > 0
            assert line.baseline
            assert line.ratio == pytest.approx(line.baseline_seconds / line.seconds)
            assert line.peak_memory is not None


def test_full_run_has_the_lines_with_targets():
    lines = {b.name: b for b in benchmarks(CPU, quick=False)}
    path = lines["select + attend, 8192 queries over 32768 keys"]
    assert set(path.dtypes) == {torch.bfloat16, torch.float32}
    assert {(t.metric, t.limit, t.at_least) for t in path.targets} == {("ratio", 4.0, True), ("peak_memory", 4 * 2**30, False)}
    assert "select + attend, 1M keys with 64 queries" in lines
    assert any(name.startswith("cpu: dispatch overhead, eager") for name in line_names(Choice(backends=("cpu",))))


def test_full_run_has_every_production_prefill_shape():
    from m3_hw.workloads import prefill

    workloads = {b.workload: b for b in benchmarks(CPU, quick=False) if b.ops == ("sparse_attention",)}
    for shape in prefill():
        assert workloads[shape.name].note.startswith("scaled down: "), "a CPU line says what it stands for"


def test_accelerator_lines_hold_the_published_shapes():
    lines = benchmarks(torch.device("meta"), quick=False)
    assert all(b.note == "" for b in lines if b.ops == ("sparse_attention",)), "nothing is scaled down"
    assert any("1048576 keys" in b.workload for b in lines)


def test_lines_are_unique():
    for quick in (False, True):
        names = [b.name for b in benchmarks(CPU, quick=quick)]
        assert len(names) == len(set(names))


def test_targets_are_judged(quick: Bench):
    judged = [target for line in quick.lines for target in line.targets]
    assert {target["metric"] for target in judged} == {"ratio", "peak_memory", "seconds"}
    for target in judged:
        assert target["met"] == (target["value"] >= target["limit"] if target["at_least"] else target["value"] <= target["limit"])


def test_choice_narrows_the_lines():
    names = line_names(Choice(ops=("rms_norm", "rope"), dtypes=("float32",), backends=("cpu",)))
    assert [name.split(",")[0] for name in names] == ["cpu: rms_norm", "cpu: rope"]
    assert all("decode" in name for name in line_names(Choice(workloads=("decode",), backends=("cpu",))))


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (Choice(ops=("nope",)), "op has 'nope'; accepted: "),
        (Choice(backends=("nope",)), "backend has 'nope'; accepted: "),
        (Choice(dtypes=("nope",)), "dtype has 'nope'; accepted: "),
        (Choice(workloads=("nope",)), "no line of the benchmark"),
    ],
)
def test_unknown_names_are_refused(choice: Choice, says: str):
    with pytest.raises(ContractError, match=says):
        run(choice)


def test_backend_that_cannot_run_a_line_says_why(monkeypatch: pytest.MonkeyPatch):
    from m3_hw.dispatch import backends

    cpu = backends()["cpu"]
    monkeypatch.setattr(type(cpu), "has", lambda self, op: False)
    monkeypatch.setattr(m3_hw.dispatch._operators["rms_norm"], "_table", {})
    (line,) = run(Choice(ops=("rms_norm",), dtypes=("float32",), backends=("cpu",), quick=True)).lines
    assert "rms_norm on cpu" in line.error
    assert line.seconds is None


def test_target_of_a_line_that_could_not_run_is_missed(monkeypatch: pytest.MonkeyPatch):
    from m3_hw.dispatch import backends

    monkeypatch.setattr(type(backends()["cpu"]), "has", lambda self, op: False)
    monkeypatch.setattr(m3_hw.dispatch._operators["select_blocks"], "_table", {})
    choice = Choice(
        ops=("select_blocks", "sparse_attention"), workloads=("32 queries",), dtypes=("float32",), backends=("cpu",), quick=True
    )
    (line,) = run(choice).lines
    assert line.error
    assert [(target["metric"], target["value"], target["met"]) for target in line.targets] == [
        ("ratio", None, False),
        ("peak_memory", None, False),
    ]


# timing


def test_measures_the_median_of_a_known_time():
    timing = measure(lambda: time.sleep(0.01), CPU, Effort(min_seconds=0.0, min_repeats=5, max_repeats=5))
    assert len(timing.seconds) == 5
    assert 0.01 <= timing.median < 1


def test_repeats_until_the_time_is_up():
    timing = measure(lambda: time.sleep(0.002), CPU, Effort(min_seconds=0.05, min_repeats=1, max_repeats=1000))
    assert 0.05 <= sum(timing.seconds) < 2


def test_long_first_call_is_not_repeated():
    calls: list[int] = []
    measure(lambda: (calls.append(1), time.sleep(0.02)), CPU, Effort(long_seconds=0.01))
    assert len(calls) == 1


def test_peak_memory_sees_what_was_freed_again():
    with peak_memory(CPU) as memory:
        torch.ones(2**26).sum()  # 256 MiB
        time.sleep(0.05)
    assert 200 * 2**20 < memory() < 400 * 2**20


def test_busy_neighbours_are_noticed():
    code = "import time\nend = time.time() + 0.6\nwhile time.time() < end: pass"
    with other_cores() as used, subprocess.Popen([sys.executable, "-c", code]):
        time.sleep(0.01)
    assert used() > 0.3


def test_report_says_that_the_machine_was_busy():
    line = Line("rms_norm, x", "rms_norm", "cpu", "x", "bfloat16", seconds=1.0, other_cores=1.5)
    bench = Bench("2026-01-01T00:00:00+00:00", "m3-hw bench", "a CPU", False, {"versions": {}}, {}, lines=[line])
    assert "up to 1.5 cores during 1 of 1 lines" in report.markdown(bench)
    line.other_cores = 0.0
    assert "cores" not in report.markdown(bench)


def test_ceilings_bound_the_time():
    ceilings = Ceilings(copy=100.0, matmul={"float32": 10.0})
    assert ceilings.floor_seconds(200, 10, "float32") == 2
    assert ceilings.floor_seconds(200, 50, "float32") == 5
    assert ceilings.floor_seconds(200, 0, "float32") == 2
    assert measure_ceilings(CPU, [torch.float32], QUICK).matmul["float32"] > 0


# costs: against counting one by one


@pytest.fixture
def attention() -> dict[str, Any]:
    """Queries at the end of two sequences, 300 and 130 keys, with padding."""
    call = attention_call(Draw(0), torch.float32, [5, 3], [300, 130], heads=4, kv_heads=2, dim=16)
    return {k: v for k, v in call.items() if k not in ("k_scale", "v_scale", "deterministic")}


def visible(call: dict[str, Any]) -> list[int]:
    """Position of each query."""
    return [295, 296, 297, 298, 299, 127, 128, 129]


def test_cost_of_dense_attention_counts_visible_keys(attention: dict[str, Any]):
    found = cost("dense_attention", {**attention, "max_seqlen_k": 300})
    assert found.operations == sum(4 * 4 * 16 * (position + 1) for position in visible(attention))
    assert found.bytes == 2 * 8 * 4 * 16 * 4 + 8 * 4 * 4 + 2 * (300 + 130) * 2 * 16 * 4


def test_cost_of_sparse_attention_counts_listed_keys(attention: dict[str, Any]):
    ids = torch.tensor([[0, 2], [1, 2], [2, -1], [0, 1], [2, -1], [0, -1], [0, 1], [1, -1]], dtype=torch.int32)
    ids = torch.stack([ids, ids])  # [Hkv, T, K]
    pairs, blocks = 0, set()
    for head in range(2):
        for t, position in enumerate(visible(attention)):
            for block in ids[head, t].tolist():
                if block >= 0:
                    blocks.add((head, t < 5, block))
                    pairs += min(PAGE_SIZE, position + 1 - block * PAGE_SIZE)
    found = cost("sparse_attention", {**attention, "block_ids": ids})
    assert found.operations == 4 * 2 * 16 * pairs
    assert found.bytes == 2 * 8 * 4 * 16 * 4 + 8 * 4 * 4 + ids.numel() * 4 + len(blocks) * 2 * PAGE_SIZE * 16 * 4


def test_cost_of_expert_products_counts_touched_weights():
    ids = torch.tensor([[0, 2], [2, -1], [7, 2]], dtype=torch.int32)  # 4 kept, experts 0 and 2
    x, up, down = torch.ones(3, 8), torch.ones(4, 12, 8), torch.ones(4, 8, 6)
    found = cost("moe_experts", {"x": x, "ids": ids, "w_gate_up": up, "w_down": down})
    assert found.operations == 2 * 4 * (12 * 8 + 8 * 6)
    assert found.bytes == 2 * 3 * 8 * 4 + 2 * (12 * 8 + 8 * 6) * 4


def test_cost_of_grouped_gemm_skips_experts_without_rows():
    call = {"rows": torch.ones(5, 8), "weight": torch.ones(3, 4, 8), "offsets": torch.tensor([0, 2, 2, 5], dtype=torch.int32)}
    found = cost("grouped_gemm", call)
    assert found.operations == 2 * 5 * 8 * 4
    assert found.bytes == (5 * 8 + 2 * 4 * 8 + 5 * 4) * 4


# baselines: the same work, by the same numbers


def call_of(op: str, part: str = "") -> dict[str, Any]:
    """The call of an operator's quick line."""
    (found,) = [b for b in benchmarks(CPU, quick=True) if b.ops == (op,) and part in b.workload]
    return found.make(Inputs.on(torch.float32, CPU)).call


def flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [t for part in value for t in flat(part)]


@pytest.mark.parametrize(
    "op", ["rms_norm", "add_rms_norm", "rope", "qk_norm_rope", "swiglu_oai", "route_tokens", "grouped_gemm", "moe_experts"]
)
def test_baseline_computes_the_operator(op: str):
    call = call_of(op)
    for mine, theirs in zip(flat(specs()[op].reference(**call)), flat(baseline(op, call).run()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_attention_baseline_is_causal_attention(part: str):
    call = call_of("dense_attention", part)
    out, _ = specs()["dense_attention"].reference(**call)
    theirs = torch.cat([sequence.transpose(0, 1) for sequence in baseline("dense_attention", call).run()])
    torch.testing.assert_close(out, theirs, rtol=1e-4, atol=1e-5)


def test_attention_baseline_without_a_prefix_and_with_one_query():
    call = attention_call(Draw(0), torch.float32, [70, 1, 1], [70, 1, 200])
    call |= {"max_seqlen_k": 200}
    out, _ = specs()["dense_attention"].reference(**call)
    theirs = torch.cat([sequence.transpose(0, 1) for sequence in baseline("dense_attention", call).run()])
    torch.testing.assert_close(out, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_selection_baseline_takes_the_same_blocks(part: str):
    call = call_of("select_blocks", part)
    call["top_k"] = 2
    theirs = torch.cat(baseline("select_blocks", call).run(), dim=1)
    assert torch.equal(specs()["select_blocks"].reference(**call).long(), theirs)


def test_varlen_baseline_computes_the_operator():
    call = call_of("varlen_attention")
    theirs = torch.cat([image[0].transpose(0, 1) for image in baseline("varlen_attention", call).run()])
    torch.testing.assert_close(specs()["varlen_attention"].reference(**call), theirs, rtol=1e-4, atol=1e-5)


def test_permuting_baselines_move_the_same_rows():
    call = call_of("permute_tokens")
    rows, source, offsets = specs()["permute_tokens"].reference(**call)
    their_rows, their_source, ends = baseline("permute_tokens", call).run()
    assert torch.equal(rows, their_rows)
    assert torch.equal(source.long(), their_source)
    assert torch.equal(offsets[1:].long(), ends)
    call = call_of("unpermute_tokens")
    torch.testing.assert_close(specs()["unpermute_tokens"].reference(**call), baseline("unpermute_tokens", call).run())


@pytest.mark.parametrize("granularity", ["tensor", "row", "group128", "block128"])
def test_quantisation_baseline_gives_the_same_scales(granularity: str):
    call = call_of("quantize_fp8", granularity)
    value, scale = specs()["quantize_fp8"].reference(**call)
    their_value, their_scale = baseline("quantize_fp8", call).run()
    torch.testing.assert_close(scale, their_scale)
    assert (value.float() - their_value.float()).abs().max() <= 32  # one step of fp8 at the most, where a scale differs by a bit


def test_microscaling_baseline_computes_the_operator():
    call = call_of("dequantize_mxfp8")
    assert torch.equal(specs()["dequantize_mxfp8"].reference(**call), baseline("dequantize_mxfp8", call).run())


def test_cache_baseline_writes_the_same_slots():
    call = call_of("write_kv")
    mine = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    specs()["write_kv"].reference(**mine)
    baseline("write_kv", call).run()
    for name in ("k_cache", "v_cache", "index_k_cache"):
        assert torch.equal(mine[name], call[name])


# files


def test_json_survives_a_round_trip(quick: Bench, tmp_path: Path):
    quick.save(tmp_path / "bench.json")
    assert Bench.load(tmp_path / "bench.json") == quick
    data = json.loads((tmp_path / "bench.json").read_text())
    assert {"created", "command", "device", "environment", "ceilings", "lines"} <= set(data)
    assert data["environment"]["versions"]["torch"] == torch.__version__


def test_markdown_has_a_row_for_each_line(quick: Bench):
    text = report.markdown(quick)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == len(quick.lines) + 2
    assert len({row.count("|") for row in rows}) == 1
    assert "m3-hw bench --quick" in text
    assert ">= 4x" in text


def test_picture_is_a_large_enough_png(quick: Bench, tmp_path: Path):
    report.plot(quick, tmp_path / "bench.png")
    data = (tmp_path / "bench.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1200
    assert height >= 20 * len([line for line in quick.lines if line.ratio])


def test_lines_that_could_not_run_are_reported_and_not_drawn(tmp_path: Path):
    line = Line("rms_norm, x", "rms_norm", "cuda", "x", "bfloat16", error="not written yet")
    bench = Bench("2026-01-01T00:00:00+00:00", "m3-hw bench", "none", False, {"versions": {}}, {}, lines=[line])
    assert "not written yet" in report.markdown(bench)
    report.plot(bench, tmp_path / "bench.png")


def test_command_writes_every_file(tmp_path: Path):
    files = {name: tmp_path / "new" / f"bench.{name}" for name in ("json", "plot", "markdown")}
    options = [text for name, file in files.items() for text in (f"--{name}", str(file))]
    result = CliRunner().invoke(app, ["bench", "--quick", "--op", "rms_norm,dispatch", "--backend", "cpu", *options])
    assert result.exit_code == 0, result.output
    assert {line.op for line in Bench.load(files["json"]).lines} == {"rms_norm", "dispatch"}
    assert all(file.stat().st_size for file in files.values())
    assert "3/3" in result.stderr
    again = CliRunner().invoke(app, ["bench", "--from", str(files["json"]), "--markdown", str(tmp_path / "again.md")])
    assert again.exit_code == 0
    assert (tmp_path / "again.md").read_text() == files["markdown"].read_text()


def test_command_lists_its_lines():
    result = CliRunner().invoke(app, ["bench", "--list", "--backend", "cpu", "--op", "rms_norm"])
    assert result.stdout.startswith("cpu: rms_norm, 4096 x 6144, bfloat16\n")


def test_command_refuses_unknown_names():
    result = CliRunner().invoke(app, ["bench", "--op", "nope"])
    assert result.exit_code == 2
    assert "accepted: " in result.stderr
