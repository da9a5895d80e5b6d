"""Deterministic test data: the same bits on every host and in every version.

Source: numpy guarantees the stream of `Philox.random_raw` across versions (NEP 19), which it does not
for `Generator` methods, nor torch for `torch.rand`. Values are small integers scaled by powers of two,
exact in every dtype drawn, so x86 and Arm hosts agree bit for bit.
"""

from collections.abc import Sequence
from math import prod, sqrt
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

RANGES: dict[str, tuple[str, float]] = {
    "unit": ("uniform", 1.0),
    "tiny": ("uniform", 2.0**-10),
    "small": ("uniform", 2.0**-4),
    "wide": ("uniform", 2.0**3),
    "normal": ("normal", 1.0),
    "outliers": ("outliers", 1.0),
    "zeros": ("zeros", 1.0),
}
"""Value ranges that a certify run draws from: distribution and scale. "outliers" makes 1 value in 64 32 times
larger, "zeros" clears half of the values; both are what activations of large models look like."""


class Draw:
    """A seeded source of integers, values, choices and permutations."""

    def __init__(self, seed: int, value_range: str = "unit") -> None:
        self._bits = np.random.Philox(key=seed)
        self.value_range = value_range

    def _words(self, count: int) -> np.ndarray:
        return np.asarray(self._bits.random_raw(count), dtype=np.uint64)

    def integers(self, low: int, high: int, shape: Sequence[int] = ()) -> Tensor:
        """int64 values of low to high - 1."""
        words = self._words(prod(shape)) >> np.uint64(1)
        return torch.from_numpy((words % np.uint64(high - low)).astype(np.int64) + low).reshape(tuple(shape))

    def integer(self, low: int, high: int) -> int:
        """One value of low to high - 1."""
        return int(self.integers(low, high))

    def choice(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.integer(0, len(options))]

    def permutation(self, n: int) -> Tensor:
        """0 to n - 1 in a drawn order."""
        return torch.from_numpy(np.argsort(self._words(n), kind="stable"))

    def softmax_scale(self, dim: int) -> float:
        """dim^-0.5, less for the ranges of large values, as norms keep scores small in a trained model.

        fp32 knows a score of 1000 to 1e-4: on such scores every attention differs from fp64's by more than its limit.
        """
        kind, spread = RANGES[self.value_range]
        root_mean_square = 4.0 if kind == "outliers" else max(1.0, spread)  # over the unit range's
        return 1 / (sqrt(dim) * root_mean_square**2)

    def values(self, shape: Sequence[int], dtype: torch.dtype, *, scale: float = 1.0) -> Tensor:
        """Values of the draw's range times `scale` (a power of two): 8 significant bits, 16 for fp32 and fp64."""
        kind, spread = RANGES[self.value_range]
        fine = dtype in (torch.float32, torch.float64)
        integer, limit = (np.int16, 2.0**15) if fine else (np.int8, 2.0**7)
        count = prod(shape)

        def uniform() -> Tensor:
            raw = self._words(-(-count * np.dtype(integer).itemsize // 8)).view(integer)[:count]
            return torch.from_numpy(raw.copy()).reshape(tuple(shape)).to(torch.float64 if dtype == torch.float64 else torch.float32)

        drawn = uniform()
        if kind == "normal":  # Sum of four uniforms: standard deviation about 0.6, then cut to the dtype's bits.
            drawn = ((drawn + uniform() + uniform() + uniform()) / 2).trunc().clamp(-limit, limit - 1)
        if kind == "outliers":
            drawn = torch.where(self.integers(0, 64, shape) == 0, drawn * 32, drawn)
        if kind == "zeros":
            drawn = torch.where(self.integers(0, 2, shape) == 0, torch.zeros_like(drawn), drawn)
        return (drawn * (scale * spread / limit)).to(dtype)
