"""What other thresholds of the guard's neighbours would keep of the runs whose paths are saved (docs/results.md).

    python studies/guard_thresholds.py

For each pair (torn, scattered): runs kept more than a point below source-only; points lost where adaptation helped, on
average over runs and in the worst group.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs")]
PAIRS = [(torn, scattered) for torn in (0.03, 0.02, 0.01, 0.0) for scattered in (0.02, 0.01, 0.005)]


def main() -> None:
    from make_tables import guarded_rows, kept_epoch, load

    from usfan.adaptation import guard

    rows = [*guarded_rows(), *load("guard-fresh.json")["rows"]]
    print(f"{len(rows)} runs\ntorn   scattered   below   lost   lost in the worst group")
    for guard.TORN, guard.SCATTERED in PAIRS:
        below, lost = 0, {}
        for row in rows:
            path = row["path"]["accuracy"]
            kept = path[kept_epoch(row)]
            below += kept < path[0] - 1
            if path[-1] >= path[0]:
                lost.setdefault((row["data"], row["task"], row["setting"]), []).append(path[-1] - kept)
        mean = statistics.fmean(value for group in lost.values() for value in group)
        worst = max(statistics.fmean(group) for group in lost.values())
        print(f"{guard.TORN:<6} {guard.SCATTERED:<11} {below:<7} {mean:<6.2f} {worst:.2f}")


if __name__ == "__main__":
    main()
