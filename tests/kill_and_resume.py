"""
Kills trainings at random moments and in the middle of writing a checkpoint, has them go on, and compares them with trainings
that were left alone: parameters, optimizer, evaluations, and every row of every log, bit by bit.

    python tests/kill_and_resume.py --kills 13 --output results/resume/kills.json

A short version is part of the tests (test_resume.py).
"""

import argparse
import csv
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch as th
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tqdm.auto import tqdm

TRAIN = Path(__file__).parent / "train_until_killed.py"
ALGOS = ("qa2c", "qppo", "reinforce", "a2c", "ppo")
STACKS = ("stock", "native")
# They tell the time of day, which is another one in every run
WALL_CLOCK = ("time/fps", "time/time_elapsed")


def start(algo: str, stack: str, folder: Path, steps: int, kill_inside_write: int = 0) -> subprocess.Popen:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(TRAIN), "--algo", algo, "--stack", stack, "--folder", str(folder)]
    command += ["--steps", str(steps), "--kill-inside-write", str(kill_inside_write)]
    # In the folder, because each loader of ale-py writes a line to the standard error output
    with open(folder / "output.txt", "a") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)


def run_to_the_end(algo: str, stack: str, folder: Path, steps: int) -> float:
    """:return: seconds that it took"""
    begin = time.time()
    code = start(algo, stack, folder, steps).wait()
    assert code == 0, (folder / "output.txt").read_text()[-3000:]
    return time.time() - begin


def kill_and_resume(
    algo: str, stack: str, folder: Path, steps: int, kills: int, longest_life: float, rng: random.Random
) -> list[dict]:
    """
    :return: one row for each kill: when and how it came, and the checkpoints that it left
    """
    done: list[dict] = []
    while len(done) < kills:
        inside_write = rng.randint(1, 4) if rng.random() < 0.3 else 0
        child = start(algo, stack, folder, steps, inside_write)
        life = rng.uniform(0.5, longest_life)
        begin = time.time()
        try:
            code = child.wait(None if inside_write else life)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        if code == 0:
            break
        assert code == -9, (folder / "output.txt").read_text()[-3000:]
        checkpoints = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
        newest = checkpoints[-1] if checkpoints else None
        done.append({"after_s": round(time.time() - begin, 2), "inside_write": inside_write > 0, "newest": newest})
    run_to_the_end(algo, stack, folder, steps)
    return done


def differences(reference: Path, resumed: Path) -> list[str]:
    """:return: what is not the same in two folders, after every number in them was compared"""
    found = [name for name in ("result.npz", "evaluations.npz") if not same_arrays(reference / name, resumed / name)]
    for name, rows in (("progress.csv", csv_rows), ("progress.json", json_rows), ("tensorboard", tensorboard_rows)):
        if rows(reference) != rows(resumed):
            found.append(name)
    for path in sorted(reference.glob("*.monitor.csv")):
        if monitor_rows(path) != monitor_rows(resumed / path.name):
            found.append(path.name)
    if not same_parameters(reference, resumed):
        found.append("best_model.zip")
    return found


def same_arrays(one: Path, other: Path) -> bool:
    a, b = np.load(one), np.load(other)
    return sorted(a) == sorted(b) and all(a[name].tobytes() == b[name].tobytes() for name in a)


def same_parameters(reference: Path, resumed: Path) -> bool:
    from stable_baselines3.common.save_util import load_from_zip_file

    a, b = (load_from_zip_file(folder / "best_model", load_data=False)[1]["policy"] for folder in (reference, resumed))
    return all(th.equal(a[name], b[name]) for name in a)


def csv_rows(folder: Path) -> list[dict]:
    with open(folder / "progress.csv") as file:
        return [{key: value for key, value in row.items() if key not in WALL_CLOCK} for row in csv.DictReader(file)]


def json_rows(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "progress.json").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in WALL_CLOCK} for row in rows]


def tensorboard_rows(folder: Path) -> list[tuple]:
    """:return: step, tag and value of each row that TensorBoard shows"""
    rows: list[tuple] = []
    # TensorBoard sorts by name, in which the time is in seconds
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_ctime_ns):
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.HasField("session_log"):
                # A start that was resumed
                rows = [row for row in rows if row[0] < event.step]
            rows += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return sorted(row for row in rows if row[1] not in WALL_CLOCK)


def monitor_rows(path: Path) -> list[list[str]]:
    # The first line is a header with the time of day, the last column seconds since then
    with open(path) as file:
        return [row[:2] for row in csv.reader(list(file)[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algos", nargs="+", choices=ALGOS, default=ALGOS, help="algorithms")
    parser.add_argument("--kills", type=int, default=13, help="kills of each algorithm on each kind of environments")
    parser.add_argument("--steps", type=int, default=4000, help="environment steps of a training")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    report: dict = {
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "torch": th.__version__,
        "trainings": [],
    }
    total = len(args.algos) * len(STACKS) * args.kills
    with tempfile.TemporaryDirectory() as temporary, tqdm(total=total, unit="kill") as progress:
        for algo in args.algos:
            for stack in STACKS:
                reference = Path(temporary, f"{algo}-{stack}")
                seconds = run_to_the_end(algo, stack, reference, args.steps)
                kills, runs = [], 0
                while len(kills) < args.kills:
                    folder, runs = Path(temporary, f"{algo}-{stack}-{runs}"), runs + 1
                    new = kill_and_resume(algo, stack, folder, args.steps, args.kills - len(kills), seconds / 2, rng)
                    found = differences(reference, folder)
                    report["trainings"].append({"algo": algo, "stack": stack, "kills": new, "differences": found})
                    kills += new
                    progress.update(len(new))
                    args.output.parent.mkdir(parents=True, exist_ok=True)
                    args.output.write_text(json.dumps(report, indent=1) + "\n")
    different = [training for training in report["trainings"] if training["differences"]]
    n_kills = sum(len(training["kills"]) for training in report["trainings"])
    inside = sum(kill["inside_write"] for training in report["trainings"] for kill in training["kills"])
    print(f"{n_kills} kills, {inside} of them inside a write, {len(different)} of {len(report['trainings'])} trainings differ")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
