"""Every case x every check, on every backend: the suite that outside backends run too."""

from m3_hw.parity.suite import test_parity, test_unsupported_toml_names_what_exists

__all__ = ["test_parity", "test_unsupported_toml_names_what_exists"]
