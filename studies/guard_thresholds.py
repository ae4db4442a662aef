"""What other thresholds of the guard's rules about neighbours would keep of the runs whose paths are saved.

    python studies/guard_thresholds.py

First pairs (torn, scattered), without the rule of what a move must bring; then that rule (together, most moved). For
each: runs kept more than a point below source-only; points lost where adaptation helped, on average over runs and in
the worst group. The figures are in docs/results.md.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs")]
PAIRS = [(torn, scattered) for torn in (0.03, 0.02, 0.01, 0.0) for scattered in (0.02, 0.01, 0.005)]
MOVES = [(together, most) for most in (0.5, 0.6, 1.0) for together in (0.1, 0.15, 0.2, 0.25, 0.3)]


def main() -> None:
    from make_tables import guarded_rows, load

    from usfan.adaptation import guard

    rows = [*guarded_rows(), *load("guard-fresh.json")["rows"]]
    print(f"{len(rows)} runs\ntorn   scattered   below   lost   lost in the worst group")
    chosen = guard.TORN, guard.SCATTERED, guard.TOGETHER, guard.MOVES
    guard.TOGETHER = float("-inf")
    for guard.TORN, guard.SCATTERED in PAIRS:
        print(f"{guard.TORN:<6} {guard.SCATTERED:<11}", outcome(rows))
    guard.TORN, guard.SCATTERED = chosen[:2]
    print("\ntogether   most moved   below   lost   lost in the worst group")
    for guard.TOGETHER, most in MOVES:
        guard.MOVES = (chosen[3][0], most)
        print(f"{guard.TOGETHER:<10} {most:<12}", outcome(rows))


def outcome(rows: list[dict]) -> str:
    from make_tables import kept_epoch

    below, lost = 0, {}
    for row in rows:
        path = row["path"]["accuracy"]
        kept = path[kept_epoch(row)]
        below += kept < path[0] - 1
        if path[-1] >= path[0]:
            lost.setdefault((row["data"], row["task"], row["setting"]), []).append(path[-1] - kept)
    mean = statistics.fmean(value for group in lost.values() for value in group)
    worst, group = max((statistics.fmean(values), name) for name, values in lost.items())
    return f"{below:<7} {mean:<6.2f} {worst:.2f} ({', '.join(group)})"


if __name__ == "__main__":
    main()
