"""Tiles of rows whose fp32 temporaries stay in the cache while several elementwise passes go over them."""

from collections.abc import Iterator

ELEMENTS = 2**18
"""Of a tile: 1 MiB of fp32, which still feeds eight threads at torch's grain of 2^15 elements."""


def row_tiles(num_rows: int, width: int) -> Iterator[slice]:
    """Slices that cover `num_rows` rows of `width` elements each."""
    step = max(1, ELEMENTS // max(1, width))
    return (slice(start, start + step) for start in range(0, num_rows, step))
