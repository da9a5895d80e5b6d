"""Fails when a backend is written and its hardware is here, but it can't be used. Arguments: backends to expect."""

import sys

import m3_hw

NOT_WRITTEN = "not written yet"


def main(expected: list[str]) -> int:
    reasons: dict[str, set[str]] = {name: set() for name in expected}
    for row in m3_hw.capabilities():
        if row.backend in reasons and row.status == "unavailable":
            reasons[row.backend].update(row.reasons)
    broken = {name: found - {NOT_WRITTEN} for name, found in reasons.items() if found - {NOT_WRITTEN}}
    for name, found in broken.items():
        print(f"{name}: its hardware is here, but the backend can't be used: {'; '.join(sorted(found))}", file=sys.stderr)
    print(f"Hardware here: {', '.join(expected)}")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
