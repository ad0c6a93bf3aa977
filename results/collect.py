"""
Copy what is worth keeping of RL Zoo's run folders, without models, monitor files and paths of the machine.

    python results/collect.py LOGS TARGET

LOGS has one folder and one log for each run, as the ``run.sh`` of a study makes them; TARGET gets a folder for each run:
what was printed, the evaluations, the settings and the command, and the curves of TensorBoard as CSV.
"""

import argparse
import csv
import re
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

KEPT = ("evaluations.npz", "*/config.yml", "*/args.yml", "*/command.txt")


def without_machine_paths(text: str) -> str:
    """:return: the text with absolute paths cut to what follows the folder of the logs, the checkout, the environment"""
    text = text.replace(f"{Path(__file__).resolve().parent.parent}/", "")
    text = re.sub(r"(?<![\w.])/(?:[\w.-]+/)+(?=[\w.-]*seed-)", "logs/", text)
    return re.sub(r"(?<![\w.])/\S*/(bin|site-packages)/", "", text)


def write_curves(events: Path, target: Path) -> None:
    """:param events: folder of TensorBoard; :param target: CSV file to write, one row for each step that was logged"""
    accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})
    accumulator.Reload()
    rows: dict[int, dict[str, float]] = {}
    tags = sorted(accumulator.Tags()["scalars"])
    for tag in tags:
        for event in accumulator.Scalars(tag):
            rows.setdefault(event.step, {})[tag] = float(f"{event.value:.6g}")
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *tags])
        writer.writeheader()
        writer.writerows({"step": step, **rows[step]} for step in sorted(rows))


def main() -> None:
    """Collect every run of the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, metavar="LOGS")
    parser.add_argument("target", type=Path, metavar="TARGET")
    args = parser.parse_args()
    for log in sorted(args.logs.glob("*.log")):
        (run,) = (args.logs / log.stem).glob("*/*_1")
        target = args.target / log.stem
        target.mkdir(parents=True, exist_ok=True)
        (target / "printed.txt").write_text(without_machine_paths(log.read_text()))
        for pattern in KEPT:
            for path in run.glob(pattern):
                if path.suffix == ".npz":
                    (target / path.name).write_bytes(path.read_bytes())
                else:
                    (target / path.name).write_text(without_machine_paths(path.read_text()))
        for events in sorted((args.logs / log.stem / "tensorboard").glob("*/*/")):
            write_curves(events, target / "curves.csv")


if __name__ == "__main__":
    main()
