"""What the tests against `transformers` share: M3 configurations, modules with random weights, drawn pages."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import m3_hw

PAGE = 128


@pytest.fixture(params=("reference", "cpu"), autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with m3_hw.use_backend(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(20260615)


SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk_blocks": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 48,
    "shared_intermediate_size": 40,
    "dense_intermediate_size": 80,
}

# M3's heads, experts and selection; only the widths that no operator's contract knows are cut.
M3_HEADS = {
    "hidden_size": 96,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk_blocks": 16,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "intermediate_size": 48,
    "shared_intermediate_size": 48,
    "dense_intermediate_size": 192,
}


def _text_config(sizes: dict[str, Any], **changes: Any) -> Any:
    configuration = pytest.importorskip("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
    config = configuration.MiniMaxM3VLTextConfig(
        **{
            "vocab_size": 128,
            "num_hidden_layers": 1,
            "index_block_size": PAGE,
            "index_local_blocks": 1,
            "routed_scaling_factor": 2.0,
            # Half of the head is rotated. `rotary_dim` alone would not say so: nothing there reads it.
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "bos_token_id": None,
            "eos_token_id": None,
            **sizes,
            **changes,
        }
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


@pytest.fixture
def small() -> Any:
    """A small MiniMax-M3 text config."""
    return _text_config(SMALL)


@pytest.fixture(params=("small", "m3_heads"))
def config(request: pytest.FixtureRequest) -> Any:
    """A small text config, and one with M3's heads."""
    return _text_config({"small": SMALL, "m3_heads": M3_HEADS}[request.param])


@pytest.fixture
def build(random: torch.Generator) -> Callable[..., Any]:
    """Makes a module with random weights and buffers, norms included."""

    def make(module_class: Callable[..., nn.Module], *args: Any, std: float = 0.2) -> nn.Module:
        module = module_class(*args).eval()
        for tensor in (*module.parameters(), *(b for name, b in module.named_buffers() if "bias" in name)):
            tensor.copy_(torch.randn(tensor.shape, generator=random) * std)
        return module

    return make


@pytest.fixture
def tables() -> Callable[[Any, Tensor], tuple[Tensor, Tensor]]:
    """The rope tables of a config at some positions, [T, R/2] each, made as the operators want them."""

    def make(config: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
        rope = config.rope_parameters
        rotary_dim = int(config.head_dim * rope["partial_rotary_factor"])
        inv_freq = 1.0 / rope["rope_theta"] ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
        angles = positions.float()[:, None] * inv_freq
        return angles.cos(), angles.sin()

    return make


class Pages:
    """A pool for sequences of some lengths: pages in a drawn order, two of them nobody's."""

    def __init__(self, lengths: Sequence[int], random: torch.Generator) -> None:
        self.lengths = lengths
        counts = [-(-length // PAGE) for length in lengths]
        self.num_pages = sum(counts) + 2
        order = torch.randperm(self.num_pages, generator=random).int()
        self.block_table = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)  # [B, M]
        for row, pages in zip(self.block_table, order[:-2].split(counts), strict=True):
            row[: len(pages)] = pages

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, P, ...] of NaN, which no operator may let through."""
        return torch.full((self.num_pages, PAGE, *shape), torch.nan, dtype=dtype)

    def slots(self, sequence: int, positions: Tensor) -> Tensor:
        """Where a sequence's positions are kept, [T] int32."""
        return (self.block_table[sequence, positions // PAGE] * PAGE + positions % PAGE).int()

    def fill(self, sequences: Sequence[Tensor]) -> Tensor:
        """[N, P, ...] holding one [length, ...] tensor a sequence."""
        pool = self.empty(*sequences[0].shape[1:], dtype=sequences[0].dtype)
        for b, tokens in enumerate(sequences):
            pool.flatten(0, 1)[self.slots(b, torch.arange(len(tokens))).long()] = tokens
        return pool

    def gather(self, pool: Tensor, sequence: int, length: int) -> Tensor:
        """The first `length` tokens of a sequence, [length, ...]."""
        return pool.flatten(0, 1)[self.slots(sequence, torch.arange(length)).long()]


@pytest.fixture
def paginate(random: torch.Generator) -> Callable[..., Pages]:
    """Makes `Pages` for sequences of some lengths."""
    return lambda *lengths: Pages(lengths, random)


@pytest.fixture
def packed() -> Callable[[Sequence[int], Sequence[int]], tuple[Tensor, Tensor]]:
    """(cu_seqlens_q, seq_lens) of a batch, from its numbers of queries and of keys."""
    return lambda queries, lengths: (torch.tensor([0, *queries]).cumsum(0).int(), torch.tensor(lengths, dtype=torch.int32))
