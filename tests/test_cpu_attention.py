"""What the CPU's attention promises beyond parity: every path of it is right, and none holds queries x keys."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from m3_hw.contract import PAGE_SIZE
from m3_hw.dispatch import specs
from m3_hw.draw import Draw
from m3_hw.paged import attention_call, paged_batch
from m3_hw.parity.cases import golden, run_op
from m3_hw.parity.judge import Outputs, judge
from m3_hw.spec import Call

DTYPES = [torch.float32, torch.bfloat16]


class LargestResult(TorchDispatchMode):
    """Elements of the largest tensor, views apart, that any torch operation inside gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        fresh = [t.untyped_storage().nbytes() // t.itemsize for t in tree_leaves(result) if isinstance(t, Tensor) and not t._is_view()]
        self.elements = max([self.elements, *fresh])
        return result


def sparse_call(dtype: torch.dtype, queries: int, length: int, top_k: int, **options: Any) -> Call:
    """Every query attends to its own block and to drawn ones: some repeated, some -1, some past its own block."""
    draw = Draw(1)
    call = attention_call(draw, dtype, [queries], [length], **options)
    ids = draw.integers(-1, length // PAGE_SIZE + 1, (call["k_cache"].shape[1], queries, top_k)).to(torch.int32)
    ids[..., 0] = ((length - queries + torch.arange(queries)) // PAGE_SIZE).int()
    return {**call, "block_ids": ids}


def select_call(dtype: torch.dtype, queries: int, length: int, *, heads: int = 2, dim: int = 16, top_k: int = 6) -> Call:
    draw = Draw(2)
    batch, num_rows, num_pages = paged_batch(draw, [queries], [length])
    return {
        "index_q": draw.values((num_rows, heads, dim), dtype),
        "index_k_cache": draw.values((num_pages, PAGE_SIZE, dim), dtype),
        **batch,
        "top_k": top_k,
        "local_blocks": 1,
        "init_blocks": 0,
        "max_seqlen_q": queries,
        "max_seqlen_k": length,
    }


def dense_call(dtype: torch.dtype, queries: int, length: int, **options: Any) -> Call:
    return {**attention_call(Draw(3), dtype, [queries], [length], **options), "max_seqlen_k": length}


def expect_golden(op: str, call: Call, dtype: torch.dtype) -> Outputs:
    outputs = run_op(specs()[op], "cpu", call)
    verdict = judge(specs()[op], call, dtype, outputs, golden(specs()[op], call))
    assert verdict.passed, verdict.message
    return outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries_a_block", [0, 10**9], ids=["by block", "by query"])
def test_sparse_attention_is_right_by_block_and_by_query(queries_a_block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("m3_hw.backends.cpu.sparse_attention")
    monkeypatch.setattr(module, "QUERIES_A_BLOCK", queries_a_block)
    monkeypatch.setattr(module, "TILE", 128)
    monkeypatch.setattr(module, "GATHERED", 2048)
    expect_golden("sparse_attention", sparse_call(dtype, 300, 1000, 4, heads=4, kv_heads=2, dim=32), dtype)


@pytest.mark.parametrize("deterministic", [False, True])
def test_sparse_attention_takes_the_path_that_its_docstring_names(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("m3_hw.backends.cpu.sparse_attention")
    taken = []
    for path in ("_by_block", "_by_query"):
        inner = getattr(module, path)
        monkeypatch.setattr(module, path, lambda *args, path=path, inner=inner: (taken.append(path), inner(*args))[1])
    for queries in (200, 1):  # of 4 blocks each, over 8
        call = sparse_call(torch.float32, queries, 1000, 4, heads=2, kv_heads=1, deterministic=deterministic)
        run_op(specs()["sparse_attention"], "cpu", call)
    assert taken == (["_by_query", "_by_query"] if deterministic else ["_by_block", "_by_query"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 64, 72, 128])
@pytest.mark.parametrize("queries", [1, 2, 130])
def test_dense_attention_is_right_in_narrow_and_wide_heads(queries: int, dim: int, dtype: torch.dtype) -> None:
    """Small values make all probabilities alike: the case in which bf16 loses most."""
    call = dense_call(dtype, queries, 4225, heads=4, kv_heads=2, dim=dim)
    expect_golden("dense_attention", {**call, "q": call["q"] / 64}, dtype)


def test_dense_attention_over_a_whole_prompt_is_torchs() -> None:
    call = dense_call(torch.float64, 400, 400, heads=4, kv_heads=2, dim=16)
    out = run_op(specs()["dense_attention"], "cpu", call)["out"]
    keys, values = (
        call[name][call["block_table"][0, :-1].long()].transpose(0, 1).flatten(1, 2)[:, :400] for name in ("k_cache", "v_cache")
    )
    wanted = scaled_dot_product_attention(
        call["q"].transpose(0, 1)[None], keys[None], values[None], is_causal=True, scale=call["scale"], enable_gqa=True
    )
    torch.testing.assert_close(out, wanted[0].transpose(0, 1))


@pytest.mark.parametrize("op", ["select_blocks", "sparse_attention"])
def test_no_path_holds_queries_times_keys(op: str) -> None:
    queries, length = 2048, 2**15
    if op == "select_blocks":
        call = select_call(torch.float32, queries, length, heads=1)
    else:
        call = sparse_call(torch.float32, queries, length, 16, heads=1, kv_heads=1, dim=16)
    implementation = getattr(import_module(f"m3_hw.backends.cpu.{op}"), op)  # a mode doesn't see into a torch.library operator
    with LargestResult() as largest:
        implementation(**call)
    assert queries * length / 256 <= largest.elements <= queries * length / 16


def test_a_million_keys() -> None:
    """Two queries against fp64; the bench runs 64 of them at M3's heads."""
    length = 2**20 - 3
    ids = expect_golden("select_blocks", select_call(torch.float32, 2, length, top_k=16), torch.float32)["ids"]
    assert ids.shape == (2, 2, 16)
    assert ids.max() == length // PAGE_SIZE, "the local block"
    call = {**sparse_call(torch.float32, 2, length, 16, heads=4, kv_heads=2, dim=16), "block_ids": ids}
    expect_golden("sparse_attention", call, torch.float32)
