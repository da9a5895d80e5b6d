"""The parity harness: does a backend compute what the reference computes? Usable by authors of other backends."""
