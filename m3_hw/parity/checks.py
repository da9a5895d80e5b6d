"""What every operator must hold on every backend. Each check is written once, for all of them.

A check takes a `Subject` and returns a `Judgement`; an exception that it lets through is a failure too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from m3_hw import contract
from m3_hw.dispatch import backends, specs, use_backend, value_checks
from m3_hw.errors import ContractError
from m3_hw.parity.cases import DTYPES, clone, copied, device_of, golden, make_call, make_draw, named_outputs, run_op, to_device
from m3_hw.parity.judge import Judgement, Outputs, judge
from m3_hw.parity.results import Case
from m3_hw.spec import Call, OpSpec


class Subject:
    """A case ready to be checked. `call`, `golden` and `outputs` are made once and must not be changed."""

    def __init__(self, case: Case, seed: int = 0, call: Call | None = None) -> None:
        self.case = case
        self.seed = seed
        self.spec: OpSpec[..., Any] = specs()[case.op]
        self.dtype = DTYPES[case.dtype]
        self.device = device_of(case.backend)
        if call is not None:
            self.call = call

    @cached_property
    def call(self) -> Call:
        """The inputs, on the CPU."""
        return make_call(self.case, self.seed)

    @cached_property
    def golden(self) -> Outputs:
        """What the outputs are measured against."""
        return golden(self.spec, self.call)

    @cached_property
    def outputs(self) -> Outputs:
        """What the backend gives for the call, on the CPU."""
        return self.run(self.call)

    def on_device(self, call: Call) -> Call:
        """A copy of a call on the backend's device."""
        return to_device(clone(call), self.device)

    def run_there(self, call: Call) -> Outputs:
        """Run the backend on a call that is already on its device; outputs stay there, as what it writes does."""
        return run_op(self.spec, self.case.backend, call)

    def run(self, call: Call) -> Outputs:
        """Run the backend on a copy of a CPU call; outputs on the CPU."""
        return copied(self.run_there(self.on_device(call)))

    def judge(self, actual: Outputs) -> Judgement:
        """The verdict on outputs for the subject's call."""
        return judge(self.spec, self.call, self.dtype, actual, self.golden)


OK = Judgement(True)


def failed(message: str) -> Judgement:
    """A verdict without numbers."""
    return Judgement(False, message)


def parity(subject: Subject) -> Judgement:
    """Outputs have the spec's shapes, dtypes and layout, and are within its tolerance of the golden ones."""
    if problem := _structure(subject, subject.outputs):
        return failed(problem)
    return subject.judge(subject.outputs)


def _structure(subject: Subject, outputs: Outputs) -> str:
    """Where outputs differ from what the fake kernel promises."""
    spec = subject.spec
    if spec.mutates:
        return ""
    fake = spec.fake(**{k: v.to("meta") if isinstance(v, Tensor) else v for k, v in subject.call.items()})
    promised = dict(zip(spec.outputs, fake if isinstance(fake, tuple) else (fake,), strict=True))
    for name, wanted in promised.items():
        has = outputs[name]
        if (has.shape, has.dtype) != (wanted.shape, wanted.dtype):
            return f"{name} is {has.dtype} {list(has.shape)}; wanted: {wanted.dtype} {list(wanted.shape)}"
        if not has.is_contiguous():
            return f"{name} has strides {has.stride()}; wanted: contiguous"
    return ""


def contract_errors(subject: Subject) -> Judgement:
    """Every malformed call raises a ContractError that names the argument, before any memory is written."""
    for sample in subject.spec.error_samples:
        if sample.reads_values and not value_checks(subject.device):
            continue
        bad = sample.change(subject.on_device(subject.call))
        before = clone(bad)
        try:
            subject.run_there(bad)
        except ContractError as error:
            if f"{sample.argument} has " not in str(error):
                return failed(f"{sample.name}: the error doesn't name {sample.argument}: {error}")
        else:
            return failed(f"{sample.name}: no ContractError")
        if changed := _changed(bad, before):
            return failed(f"{sample.name}: {changed} was written before the error")
    return OK


def strided(subject: Subject) -> Judgement:
    """Inputs with gaps between elements, or stored in another axis order, give the same; gaps are never written."""
    if problem := _strided_problem(subject):
        return failed(problem)
    reversed_axes = {k: with_reversed_axes(v) if isinstance(v, Tensor) else v for k, v in subject.on_device(subject.call).items()}
    outputs = subject.run_there(reversed_axes)
    if problem := _structure(subject, outputs):
        return failed(f"axes stored in reverse: {problem}")
    judgement = subject.judge(copied(outputs))
    return judgement._replace(message=f"axes stored in reverse: {judgement.message}") if not judgement.passed else judgement


def _strided_problem(subject: Subject) -> str:
    call, bases = subject.on_device(subject.call), {}
    for name, value in call.items():
        if isinstance(value, Tensor) and value.dim():
            call[name], bases[name] = with_gaps(value)
    before = {name: bases[name].clone() for name in subject.spec.mutates if name in bases}
    outputs = subject.run_there(call)
    if problem := _structure(subject, outputs):
        return f"elements apart: {problem}"
    judgement = subject.judge(copied(outputs))
    for name, base in before.items():
        call[name].copy_(_view_like(base, call[name]))  # what may be written is put back, then nothing may differ
        if not same_bits(bases[name], base):
            return f"memory between the elements of {name} was written"
    return "" if judgement.passed else f"elements apart: {judgement.message}"


def poison(dtype: torch.dtype) -> float | int:
    """What no operator may read or trust: NaN, or an index far outside everything."""
    return torch.nan if dtype.is_floating_point else 2**30 if dtype.itemsize >= 4 else torch.iinfo(dtype).max


def with_gaps(x: Tensor) -> tuple[Tensor, Tensor]:
    """A view with the same values, poison between them and one more of everything around; and what it is a view of."""
    base = torch.full([size + 1 for size in x.shape[:-1]] + [2 * x.shape[-1] + 1], poison(x.dtype), device=x.device).to(x.dtype)
    view = base[tuple(slice(0, size) for size in x.shape[:-1])][..., : 2 * x.shape[-1] : 2]
    return view.copy_(x), base


def _view_like(base: Tensor, view: Tensor) -> Tensor:
    return base.as_strided(view.shape, view.stride(), view.storage_offset())


def with_reversed_axes(x: Tensor) -> Tensor:
    """The same values, the first axis contiguous."""
    axes = tuple(reversed(range(x.dim())))
    return x.permute(axes).contiguous().permute(axes)


def unowned(subject: Subject) -> Judgement:
    """What nobody owns may hold NaN or large numbers: the same bits come out."""
    assert subject.spec.unowned is not None
    masks = subject.spec.unowned(subject.call)
    for fill in (torch.nan, 1e4):
        outputs = subject.run(poisoned(subject.call, masks, fill))
        for name, mask in masks.items():
            if name in subject.spec.mutates:  # It holds the poison by right.
                outputs[name] = torch.where(mask, subject.outputs[name].double(), outputs[name].double()).to(outputs[name].dtype)
        if problem := _differing(outputs, subject.outputs):
            return failed(f"with {fill} where nobody owns: {problem}")
    return OK


def poisoned(call: Call, masks: dict[str, Tensor], fill: float) -> Call:
    """A copy with `fill` where the masks say, an index far outside in integers."""
    filled = clone(call)
    for name, mask in masks.items():
        if (tensor := filled[name]) is not None:
            value = fill if tensor.is_floating_point() else (2**30 if fill == fill else -(2**30))
            filled[name] = torch.where(mask, torch.tensor(value).to(tensor.dtype), tensor)
    return filled


def repeatability(subject: Subject) -> Judgement:
    """The same call gives the same bits again."""
    return _same(subject.run(subject.call), subject.outputs, "a second run")


def inputs_unchanged(subject: Subject) -> Judgement:
    """What the operator doesn't declare to write stays as it is."""
    call = subject.on_device(subject.call)
    subject.run_there(call)
    readable = {name: value for name, value in call.items() if name not in subject.spec.mutates}
    changed = _changed(readable, subject.on_device(subject.call))
    return failed(f"{changed} was changed") if changed else OK


def no_alias(subject: Subject) -> Judgement:
    """Outputs share no memory with inputs, nor with one another, nor with those of a call before."""
    call = subject.on_device(subject.call)
    owners = {v.untyped_storage().data_ptr(): k for k, v in call.items() if isinstance(v, Tensor) and v.numel()}
    before = {} if subject.spec.mutates else subject.run_there(call)
    owners |= {v.untyped_storage().data_ptr(): f"{k} of the call before" for k, v in before.items() if v.numel()}
    for name, tensor in subject.run_there(call).items():
        if tensor.numel():
            owner = owners.setdefault(tensor.untyped_storage().data_ptr(), name)
            if owner != name:
                return failed(f"{name} shares memory with {owner}")
    return OK


def page_permutation(subject: Subject) -> Judgement:
    """Where pages lie in the pool changes no bit."""
    call, orders = permuted_pages(subject.spec, subject.call, make_draw(subject.case, subject.seed + 1).permutation)
    outputs = subject.run(call)
    for name, order in orders.items():
        if name in outputs:
            outputs[name] = outputs[name].index_select(0, order)
    return _same(outputs, subject.outputs, "other pages")


def permuted_pages(spec: OpSpec[..., Any], call: Call, permutation: Callable[[int], Tensor]) -> tuple[Call, dict[str, Tensor]]:
    """The call with the pages of its pools in another order, and each cache's new page of every old one."""
    moved, orders = clone(call), {}
    for table, caches in spec.pools.items():
        present = [name for name in caches if call[name] is not None]
        num_pages = call[present[0]].shape[0]
        order = permutation(num_pages)
        for name in present:
            moved[name] = torch.empty_like(call[name])
            moved[name][order] = call[name]
            orders[name] = order
        moved[table] = _moved_entries(table, call[table], order)
    return moved, orders


def _moved_entries(table: str, entries: Tensor, order: Tensor) -> Tensor:
    """Block tables hold pages, `slots` page * P + offset; entries outside the pool stay."""
    size = contract.PAGE_SIZE if table == "slots" else 1
    page = entries.long() // size
    owned = (entries >= 0) & (page < len(order))
    if not len(order):
        return entries
    return torch.where(owned, order[page.clamp(0, len(order) - 1)] * size + entries % size, entries.long()).to(entries.dtype)


@dataclass(frozen=True)
class Part:
    """A call cut out of another one; `rows` are the tokens of the whole call that it holds."""

    call: Call
    rows: Tensor


def _cut(spec: OpSpec[..., Any], call: Call, rows: Tensor, **changes: Any) -> Part:
    axes = {**spec.token_axes, **spec.sequence_axes}
    kept = {k: v.index_select(axes[k], rows) if k in axes and v is not None else v for k, v in call.items()}
    return Part({**kept, **changes}, rows)


def _query_part(spec: OpSpec[..., Any], call: Call, seqs: list[int], ranges: list[range]) -> Part:
    """Some queries of some sequences of a paged call; keys after the last of a sequence's queries are cut off."""
    starts, lengths = call["cu_seqlens_q"].tolist(), call["seq_lens"].tolist()
    rows = [starts[b] + i for b, kept in zip(seqs, ranges, strict=True) for i in kept]
    ends = [lengths[b] - (starts[b + 1] - starts[b] - kept.stop) for b, kept in zip(seqs, ranges, strict=True)]
    return _cut(
        spec,
        call,
        torch.tensor(rows, dtype=torch.long),
        cu_seqlens_q=torch.tensor([0, *map(len, ranges)]).cumsum(0).int(),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_table=call["block_table"][torch.tensor(seqs, dtype=torch.long)],
    )


def _queries(call: Call, b: int) -> range:
    return range(int(call["cu_seqlens_q"][b + 1] - call["cu_seqlens_q"][b]))


def alone(spec: OpSpec[..., Any], call: Call) -> Iterator[Part]:
    """Each sequence by itself; of operators without sequences, the first, the middle and the last token."""
    if "cu_seqlens_q" in call:
        for b in range(len(call["seq_lens"])):
            yield _query_part(spec, call, [b], [_queries(call, b)])
    elif spec.sequence_axes:
        starts = call["cu_seqlens"].tolist()
        for b in range(len(starts) - 1):
            rows = torch.arange(starts[b], starts[b + 1])
            yield _cut(spec, call, rows, cu_seqlens=torch.tensor([0, len(rows)], dtype=torch.int32))
    else:
        tokens = range(num_tokens(spec, call))
        for t in sorted({*tokens[:1], *tokens[len(tokens) // 2 :][:1], *tokens[-1:]}):
            yield _cut(spec, call, torch.tensor([t]))


def num_tokens(spec: OpSpec[..., Any], call: Call) -> int:
    """T of an operator with token axes."""
    return next(int(call[name].shape[axis]) for name, axis in spec.token_axes.items() if call.get(name) is not None)


def chunks(spec: OpSpec[..., Any], call: Call, split: int) -> list[Part]:
    """The call in two, before token `split`; of every sequence where there are sequences."""
    if "cu_seqlens_q" not in call:
        rows = torch.arange(num_tokens(spec, call))
        return [_cut(spec, call, rows[:split]), _cut(spec, call, rows[split:])]
    seqs = list(range(len(call["seq_lens"])))
    queries = [_queries(call, b) for b in seqs]
    return [_query_part(spec, call, seqs, [q[:split] for q in queries]), _query_part(spec, call, seqs, [q[split:] for q in queries])]


def split_points(longest: int) -> list[int]:
    """Every split of a short call; of a long one the ends, the middle, and around a page."""
    inside = range(1, longest)
    return list(inside) if longest <= 8 else sorted({1, 2, longest // 3, longest // 2, longest - 1, 127, 128, 129} & set(inside))


def _pasted(subject: Subject, parts: list[Part]) -> Outputs:
    """The whole call's outputs with those of its parts in their places. Writing operators run on one set of caches."""
    pasted = {name: tensor.clone() for name, tensor in subject.outputs.items()}
    written = {name: subject.call[name].clone() for name in subject.spec.mutates if subject.call[name] is not None}
    for part in parts:
        outputs = subject.run({**part.call, **written})
        for name, tensor in outputs.items():
            if name in written:
                written[name] = pasted[name] = tensor
            else:
                axis = {**subject.spec.token_axes, **subject.spec.sequence_axes}[name]
                pasted[name].index_copy_(axis, part.rows, tensor)
    return pasted


def batch_invariance(subject: Subject) -> Judgement:
    """A sequence, or a token, alone gives what it gives in the batch: the same bits with `deterministic`, else within tolerance."""
    strict = "deterministic" in subject.call
    if strict:
        subject = Subject(subject.case, subject.seed, {**subject.call, "deterministic": True})
    pasted = _pasted(subject, list(alone(subject.spec, subject.call)))
    if strict:
        return _same(pasted, subject.outputs, "each sequence alone")
    judgement = subject.judge(pasted)
    equal = {name: (as_bits(t) == as_bits(subject.outputs[name])).double().mean().item() for name, t in pasted.items() if t.numel()}
    metrics = {name: {**judgement.metrics.get(name, {}), "equal_bits": share} for name, share in equal.items()}
    return judgement._replace(metrics=metrics)


def chunking(subject: Subject) -> Judgement:
    """The call in two chunks, split anywhere, gives what one shot gives."""
    spec, call = subject.spec, subject.call
    if "cu_seqlens_q" in call:
        longest = max((len(_queries(call, b)) for b in range(len(call["seq_lens"]))), default=0)
    else:
        longest = num_tokens(spec, call)
    judgement = OK
    for split in split_points(longest):
        judgement = subject.judge(_pasted(subject, chunks(spec, call, split)))
        if not judgement.passed:
            return judgement._replace(message=f"split at {split}: {judgement.message}")
    return judgement


def opcheck(subject: Subject) -> Judgement:
    """torch.library.opcheck: the schema, the fake kernel and tracing agree with what the operator does."""
    with use_backend(subject.case.backend):
        overload = getattr(torch.ops.m3_hw, subject.case.op).default
        results = torch.library.opcheck(
            overload, (), subject.on_device(subject.call), test_utils=_opcheck_tests(subject.call), raise_exception=False
        )
    bad = [f"{test}: {result}" for test, result in results.items() if result != "SUCCESS"]
    return failed("; ".join(bad)) if bad else OK


def _opcheck_tests(call: Call) -> tuple[str, ...]:
    """All of opcheck's tests; without the one of the schema on fp8, which torch can't compare (`inputs_unchanged` and `no_alias` can)."""
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    has_fp8 = any(isinstance(value, Tensor) and value.dtype == contract.FP8 for value in call.values())
    return tests if has_fp8 else ("test_schema", *tests)


class _Module(torch.nn.Module):
    """One call of an operator: tensors are inputs, the rest constants."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.overload = getattr(torch.ops.m3_hw, subject.case.op).default
        self.constants = {k: v for k, v in subject.call.items() if not isinstance(v, Tensor)}

    def forward(self, tensors: dict[str, Tensor]) -> Any:
        return self.overload(**tensors, **self.constants)


def _traced(subject: Subject, trace: Callable[[_Module, dict[str, Tensor]], Any]) -> Judgement:
    tensors = {k: v for k, v in subject.on_device(subject.call).items() if isinstance(v, Tensor)}
    module = _Module(subject)
    torch._dynamo.reset()
    traced = trace(module, clone(tensors))
    with use_backend(subject.case.backend):
        returned = traced(tensors)
    outputs = named_outputs(subject.spec, returned, {**tensors, **module.constants})
    return _same(copied(outputs), subject.outputs, "traced")


def compiled(subject: Subject) -> Judgement:
    """torch.compile(fullgraph=True, dynamic=True) gives the same bits."""
    return _traced(subject, lambda module, _: torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager"))


def exported(subject: Subject) -> Judgement:
    """torch.export gives a program with the same bits."""
    return _traced(subject, lambda module, tensors: torch.export.export(module, (tensors,)).module())


def graph_replay(subject: Subject) -> Judgement:
    """A captured CUDA graph, replayed on other values in the same buffers, gives what an eager call gives."""
    call = subject.on_device(subject.call)
    other = make_call(subject.case, subject.seed + 1)
    changed = {k for k, v in call.items() if isinstance(v, Tensor) and v.is_floating_point() and v.shape == other[k].shape}
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up: compiles and allocates outside the capture
        subject.run_there(clone(call))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = subject.run_there(call)
    for name, value in call.items():
        if isinstance(value, Tensor):
            value.copy_(other[name] if name in changed else subject.call[name])
    eager = subject.run({k: other[k] if k in changed else v for k, v in subject.call.items()})
    graph.replay()
    return _same(copied(outputs), eager, "replayed")


def as_bits(x: Tensor) -> Tensor:
    """The tensor's bytes as integers, so that NaN equals NaN and -0 differs from +0."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(width)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Same shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bits(a), as_bits(b))


def _changed(call: Call, before: Call) -> str:
    """First tensor of a call that isn't what it was."""
    return next((k for k, v in call.items() if isinstance(v, Tensor) and not same_bits(v, before[k])), "")


def _differing(outputs: Outputs, wanted: Outputs) -> str:
    for name, tensor in outputs.items():
        if not same_bits(tensor, wanted[name]):
            if tensor.shape != wanted[name].shape or tensor.dtype != wanted[name].dtype:
                return f"{name} is {tensor.dtype} {list(tensor.shape)}; wanted {wanted[name].dtype} {list(wanted[name].shape)}"
            at = (as_bits(tensor) != as_bits(wanted[name])).nonzero()
            first = at[0].tolist()
            return (
                f"{name} differs in {len(at)} of {tensor.numel()} elements, first at {first}: {tensor[*first]} and {wanted[name][*first]}"
            )
    return ""


def _same(outputs: Outputs, wanted: Outputs, what: str) -> Judgement:
    problem = _differing(outputs, wanted)
    return failed(f"{what}: {problem}") if problem else OK


@dataclass(frozen=True)
class Check:
    """A check and the cases that it runs on unless it is asked for by name."""

    function: Callable[[Subject], Judgement]
    applies: Callable[[Subject], bool] = lambda subject: True
    once: bool = False  # on the operator's first sample only
    tiers: tuple[str, ...] = ("small",)


def _has_tokens(subject: Subject) -> bool:
    """Whether the call can be cut between tokens: norms also take one row without a token axis."""
    first = next(iter(subject.spec.token_axes), None)
    return first is not None and subject.call[first].dim() > 1


CHECKS = {
    "parity": Check(parity, tiers=("small", "model", "stress")),
    "contract_errors": Check(contract_errors, once=True),
    "strided": Check(strided),
    "unowned": Check(unowned, lambda s: s.spec.unowned is not None),
    "repeatability": Check(repeatability),
    "inputs_unchanged": Check(inputs_unchanged),
    "no_alias": Check(no_alias, lambda s: not s.spec.mutates),
    "page_permutation": Check(page_permutation, lambda s: bool(s.spec.pools)),
    "batch_invariance": Check(batch_invariance, lambda s: (_has_tokens(s) or bool(s.spec.sequence_axes)) and not s.spec.mutates),
    "chunking": Check(chunking, _has_tokens),
    "opcheck": Check(opcheck, once=True),
    "compile": Check(compiled, once=True),
    "export": Check(exported, once=True),
    "graph_replay": Check(graph_replay, lambda s: s.device == "cuda" and torch.cuda.is_available(), once=True),
}
"""Every check by name."""


def applicable(subject: Subject, names: tuple[str, ...] | None) -> list[str]:
    """The checks that run on a subject: those of its tier, or those asked for by name."""
    first = subject.case.sample == subject.spec.samples[0].name
    return [
        name
        for name, check in CHECKS.items()
        if (subject.case.tier in check.tiers if names is None else name in names) and (first or not check.once) and check.applies(subject)
    ]


def simulated(backend: str) -> bool:
    """Whether the backend's cases run without its hardware in this process."""
    return backend != "reference" and device_of(backend) != backends()[backend].device_type
