"""Fails when the wheel lacks a file of the package. Argument: the wheel."""

import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".toml", ".json", ".html", ".md", ".typed"}


def package_files() -> set[str]:
    """Every file that belongs into the wheel, by its name there; backends/ is m3_hw/backends/ in it."""
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "m3_hw").rglob("*") if path.is_file()}
    found |= {f"m3_hw/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "backends").rglob("*") if path.is_file()}
    return {name for name in found if Path(name).suffix in SUFFIXES or name.endswith("py.typed")}


def main(wheel: str) -> int:
    with ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    wanted = package_files()
    missing = sorted(wanted - packed)
    for name in missing:
        print(f"{Path(wheel).name} lacks {name}", file=sys.stderr)
    strangers = sorted(name for name in packed if not name.startswith("m3_hw"))
    for name in strangers:
        print(f"{Path(wheel).name} installs {name} outside the package", file=sys.stderr)
    print(f"{Path(wheel).name}: {len(wanted) - len(missing)} of the package's {len(wanted)} files")
    return bool(missing or strangers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
