"""The operators, one spec a file."""
