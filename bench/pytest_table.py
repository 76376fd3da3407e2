"""What pytest-benchmark's own table does not show of the JSON file that it wrote: python -m bench.pytest_table FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def pytest_table(path: Path) -> str:
    """What pytest-benchmark's own table does not show of its JSON: GB/s over the least bytes, and their share."""
    lines = ["| group | contender | min ms | median ms | GB/s | of add_ |", "|---|---|---:|---:|---:|---:|"]
    for bench in json.loads(path.read_text())["benchmarks"]:
        stats, extra = bench["stats"], bench["extra_info"]
        cells = [bench["group"], extra["contender"], f"{stats['min'] * 1e3:.2f}", f"{stats['median'] * 1e3:.2f}"]
        cells += [f"{extra['gb_per_s']:.1f}", f"{extra['share_of_add']:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(pytest_table(Path(sys.argv[1])))
