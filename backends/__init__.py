"""The built-in backends. Lives beside the package and is reached as `m3_hw.backends`."""

if __name__ != "m3_hw.backends":
    raise ImportError("import this package as m3_hw.backends")
