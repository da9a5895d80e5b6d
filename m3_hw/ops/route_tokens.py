"""The MoE router: sigmoid scores, a bias that only selects, weights that sum to the routed scale."""

from collections.abc import Callable

import torch
from torch import Tensor

from m3_hw.contract import FLOATS, expect_dtype, expect_positive, expect_shape, fail
from m3_hw.draw import Draw
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, Tolerance, accumulate_dtype, spoil

SMALLEST_SUM = 2.0**-126
"""The smallest normal fp32: what the weights' denominator can't fall below."""


def route_tokens(logits: Tensor, bias: Tensor, *, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose each token's experts and weigh them.

    s = sigmoid(logits); ids = the top_k experts by s + bias; weights = scale * s[ids] / max(sum(s[ids]), 2^-126)

    The routed scale is applied here and nowhere else: no later operator has one.

    Args:
        logits: [T, E], floating; read in its own dtype, never reinterpreted.
        bias: [E], one axis, float32 (float64 with float64 logits); selects, never weighs.
        top_k: Experts per token A, 1 to E; M3 has 4 of 128.
        scale: What a token's weights sum to, finite and above 0; M3 has 2.0.

    Returns:
        (weights [T, A] in bias's dtype, ids [T, A] int32), fresh. Ids descend by s + bias; equal scores: lower id first.
        The weights follow the ids.

    Raises:
        ContractError: bias is not [E], or of another dtype; top_k is 0 or above E; scale is not finite and above 0.

    Numerics: All in fp32. NaN scores rank lowest, as -inf does, and a chosen NaN makes its row's weights NaN. A row whose
        chosen s sum to less than 2^-126, where fp32 loses its digits, gets zero weights; transformers may divide 0 by 0.

    Source: transformers `MiniMaxM3VLTopKRouter`, whose scale its MoE block applies to the output.
    """
    s = torch.sigmoid(logits.to(accumulate_dtype(logits.dtype)))  # [T, E]
    ranked = torch.nan_to_num(s + bias, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ids = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :top_k]  # [T, A]
    chosen = s.gather(-1, ids)
    total = chosen.sum(-1, keepdim=True)
    weights = torch.where(total < SMALLEST_SUM, 0, chosen / total * scale)
    return weights, ids.int().contiguous()


def _fake(logits: Tensor, bias: Tensor, *, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=accumulate_dtype(logits.dtype)), logits.new_empty(shape, dtype=torch.int32)


def _check(logits: Tensor, bias: Tensor, *, top_k: int, scale: float) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0:
        fail("logits", f"shape {list(logits.shape)}", "[T, E] with E >= 1")
    expect_dtype("logits", logits, FLOATS)
    expect_shape("bias", bias, "E", logits.shape[1:])
    expect_dtype("bias", bias, (accumulate_dtype(logits.dtype),))
    if not 1 <= top_k <= logits.shape[1]:
        fail("top_k", f"value {top_k}", f"1 to {logits.shape[1]}, the experts of logits")
    expect_positive("scale", scale)


def _scores(call: Call) -> Tensor:
    """s + bias in fp64 [T, E]; NaN and -inf as the lowest number, since they are chosen when nothing better is left."""
    scores, largest = torch.sigmoid(call["logits"].double()) + call["bias"].double(), torch.finfo(torch.float64).max
    return torch.nan_to_num(scores, nan=-largest, posinf=largest, neginf=-largest)


Values = Callable[[Draw, int, int], tuple[Tensor, Tensor]]
"""Makes logits [T, E] and bias [E]."""


def _plain(draw: Draw, num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    return draw.values((num_tokens, num_experts), torch.float32, scale=4), draw.values((num_experts,), torch.float32, scale=0.25)


def _tied(draw: Draw, num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Three logits and one bias: most rows hold more equal scores than top_k."""
    return draw.integers(-1, 2, (num_tokens, num_experts)).float(), torch.full((num_experts,), 0.5)


def _nearly_tied(draw: Draw, num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Scores in steps of 2^-26, all different: less than fp32 resolves there."""
    step = draw.values((num_tokens, num_experts), torch.float32).argsort(dim=-1, stable=True)
    return step * 2.0**-24, torch.full((num_experts,), 0.5)


def _underflowed(draw: Draw, num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Every other row has no expert with a score above 0."""
    logits, bias = _plain(draw, num_tokens, num_experts)
    logits[::2] = -1e4
    return logits, bias


def _faint(draw: Draw, num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Scores of e^-60, whose weights must still sum to the scale."""
    logits, bias = _plain(draw, num_tokens, num_experts)
    return logits - 60, bias


def _masked(draw: Draw, num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """A bias of -inf masks all experts but three: the others are chosen once each when nothing better is left."""
    logits, bias = _plain(draw, num_tokens, num_experts)
    bias[3:] = -torch.inf
    return logits, bias


def _flipped(draw: Draw, num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """The bias takes the experts with the lowest logits."""
    order = torch.arange(num_experts)
    return order * 0.125 + draw.values((num_tokens, num_experts), torch.float32, scale=0.125), 2.0 - order * 0.125


def _special(draw: Draw, num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """NaN, infinities and signed zeros among the logits; the last row has nothing but NaN."""
    logits, bias = _plain(draw, num_tokens, num_experts)
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 7.0)):
        logits[:, (5 * i + 3) % num_experts] = value
    logits[-1:] = torch.nan
    return logits, bias


def _sample(num_tokens: int, num_experts: int, top_k: int, values: Values = _plain) -> Callable[[Draw, torch.dtype], Call]:
    def make(draw: Draw, dtype: torch.dtype) -> Call:
        logits, bias = values(draw, num_tokens, num_experts)
        return {"logits": logits.to(dtype), "bias": bias.to(accumulate_dtype(dtype)), "top_k": top_k, "scale": 2.0}

    return make


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    num_experts = draw.integer(1, 161)
    top_k = draw.integer(1, min(num_experts, 10) + 1)
    values = draw.choice((_plain, _plain, _plain, _tied, _nearly_tied, _underflowed, _flipped))
    call = _sample(draw.integer(0, 50), num_experts, top_k, values)(draw, dtype)
    return {**call, "scale": draw.choice((1.0, 2.0, 2.826))}


_WEIGHTS = Tolerance(
    rule="rel_l2", limit=1e-6, worst_row=1e-5, reason="fp32 arithmetic on a handful of operations; a fast exp loses more at low logits"
)
_IDS = Tolerance(
    rule="selection",
    order="score",
    margin=2.0**-20,
    reason="s below 1 and s + bias below 8: rounded to 2^-22 each, the sigmoid to a few 2^-24",
)

SPEC = OpSpec(
    reference=route_tokens,
    fake=_fake,
    check=_check,
    outputs=("weights", "ids"),
    tolerances={"weights": dict.fromkeys(FLOATS, _WEIGHTS), "ids": dict.fromkeys(FLOATS, _IDS)},
    token_axes={"logits": 0, "weights": 0, "ids": 0},
    scores=_scores,
    samples=(
        Sample(name="rows", make=_sample(5, 16, 4)),
        Sample(name="empty", make=_sample(0, 16, 4)),
        Sample(name="one_token_all_experts", make=_sample(1, 3, 3)),
        Sample(name="odd", make=_sample(7, 33, 5)),
        Sample(name="ties", make=_sample(9, 24, 4, _tied)),
        Sample(name="near_ties", make=_sample(9, 24, 4, _nearly_tied)),
        Sample(name="underflow", make=_sample(5, 16, 4, _underflowed)),
        Sample(name="faint", make=_sample(5, 16, 4, _faint)),
        Sample(name="masked_experts", make=_sample(5, 16, 4, _masked)),
        Sample(name="bias_flips", make=_sample(6, 16, 4, _flipped)),
        Sample(name="special_values", make=_sample(4, 32, 4, _special)),
        Sample(name="m3", tier="model", make=_sample(4096, 128, 4)),
        Sample(name="m3_ties", tier="model", make=_sample(512, 128, 4, _tied)),
        *(
            Sample(name=f"e{num_experts}_k{top_k}", tier="model", make=_sample(130, num_experts, top_k))
            for num_experts in (8, 32, 64, 128, 160, 256)
            for top_k in (1, 2, 4, 6, 8)
        ),
        Sample(name="long", tier="stress", make=_sample(65537, 128, 4)),
        Sample(name="many_experts", tier="stress", make=_sample(1023, 1025, 16)),
    ),
    random_sample=_random_sample,
    error_samples=(
        ErrorSample(name="logits of rank 3", argument="logits", change=spoil(logits=lambda x: x[None])),
        ErrorSample(name="logits without experts", argument="logits", change=spoil(logits=lambda x: x[:, :0], bias=lambda b: b[:0])),
        ErrorSample(name="integer logits", argument="logits", change=spoil(logits=lambda x: x.int())),
        ErrorSample(name="bias [1, E]", argument="bias", change=spoil(bias=lambda b: b[None])),
        ErrorSample(name="bias too short", argument="bias", change=spoil(bias=lambda b: b[1:])),
        ErrorSample(name="bias in bfloat16", argument="bias", change=spoil(bias=lambda b: b.bfloat16())),
        ErrorSample(name="top_k zero", argument="top_k", change=spoil(top_k=0)),
        ErrorSample(name="top_k negative", argument="top_k", change=spoil(top_k=-1)),
        ErrorSample(name="top_k above the experts", argument="top_k", change=spoil(top_k=17)),
        ErrorSample(name="scale zero", argument="scale", change=spoil(scale=0.0)),
        ErrorSample(name="scale that fp32 doesn't hold", argument="scale", change=spoil(scale=1e39)),
        ErrorSample(name="scale infinite", argument="scale", change=spoil(scale=float("inf"))),
        ErrorSample(name="scale NaN", argument="scale", change=spoil(scale=float("nan"))),
    ),
)
