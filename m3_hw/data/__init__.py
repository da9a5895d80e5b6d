"""Data of the package: production shapes, with their sources named inside."""
