from collections.abc import Iterator
from pathlib import Path

import pytest

from m3_hw import dispatch
from m3_hw.backend import Backend

PLUGIN_SOURCE = Path(__file__).parent / "plugin_dist"


@pytest.fixture(autouse=True)
def _no_backend_asked_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests say which backend they mean; the shell's variables don't. Flags and warnings are read anew."""

    def forget() -> None:
        dispatch._flag.cache_clear()
        dispatch._by_default.cache_clear()
        dispatch._warned.clear()

    for variable in ("M3_HW_BACKEND", "M3_HW_FALLBACK"):
        monkeypatch.delenv(variable, raising=False)
    forget()
    yield
    forget()


@pytest.fixture
def toy_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The plugin's backend, known to this process as if its distribution were installed."""
    monkeypatch.syspath_prepend(str(PLUGIN_SOURCE))
    toy = Backend("toy", "m3_hw_toy")
    known = {**dispatch.backends(), "toy": toy}
    monkeypatch.setattr(dispatch, "backends", lambda: known)
    yield toy
    for operator in dispatch._operators.values():
        for key in [key for key in operator._table if key[0] == "toy"]:
            del operator._table[key]
