"""
A search of hyperparameters over several tasks at once, with the same budget for each algorithm: one setting has to do for all
tasks. Candidates, rounds and budgets follow from a file that is written before the search.

    python -m benchmarks.search minatar --algos qppo ppo

Each algorithm has an Optuna study for each round, all in one file, ``search.journal``. The candidates of the first round are
drawn by ``RandomSampler`` and enqueued. The best ones are enqueued again in the next round, with more steps and seeds. The
same command, started again or several times at once, goes on.
"""

import argparse
import math
import sys
import time
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import yaml
from filelock import FileLock, Timeout
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from sb3_qac.commands import HelpFormatter, add_training_options
from sb3_qac.common.checks import check_device, check_integer, check_number
from sb3_qac.common.files import make_folder
from sb3_qac.common.process import keep_freed_memory, limit_spinning
from sb3_qac.study.catalogue import TASKS
from sb3_qac.study.grid import ZOO_ENTRIES, check_entry, describe_failure, make_grid, run_study
from sb3_qac.study.loading import load_evaluations
from sb3_qac.study.manager import import_packages
from sb3_qac.study.run import Run, env_dirname
from sb3_qac.study.statistics import standard_error
from sb3_qac.zoo import register

SEARCHES = Path(__file__).with_name("searches")
# The score of a run is the mean of its last evaluations
N_LAST = 2
# Seconds between two looks at candidates that other processes train
WAIT = 10


@dataclass(frozen=True)
class Search:
    """
    A search, as its file describes it; ``searches/minatar.yml`` explains the entries.

    :param references: Return that scores 1, by environment
    :param rounds: ``candidates``, ``seeds`` and ``steps`` of each round
    :param algorithms: ``algo``, ``space``, ``fixed`` and ``start``, by the algorithm's name in this search
    :param eval_freq: Environment steps between two evaluations
    :param eval_episodes: Whole episodes of an evaluation
    :param seed: Seed of the draws. Algorithms with the same choices get the same draws.
    """

    references: dict[str, float]
    rounds: list[dict[str, Any]]
    algorithms: dict[str, dict[str, Any]]
    eval_freq: int = 100_000
    eval_episodes: int = 30
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def candidates(self, name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """
        :param name: Algorithm of the search
        :return: choices and hyperparameters of each candidate of its first round: the preset with the best setting that was
            known before, and others drawn from the grid without repetition
        """
        algorithm, study = self.algorithms[name], optuna.create_study(sampler=optuna.samplers.RandomSampler(self.seed))
        fixed, start = (algorithm.get(part, {}) for part in ("fixed", "start"))
        options = {entry: choices_of(entry, values) for entry, values in algorithm["space"].items()}
        n_points = math.prod(map(len, options.values())) if options else 0
        drawn: list[dict[str, Any]] = []
        while len(drawn) < min(self.rounds[0]["candidates"] - 1, n_points):
            draw = study.ask({entry: CategoricalDistribution(list(choices)) for entry, choices in options.items()}).params
            if draw not in drawn:
                drawn.append(draw)
        chosen = [[options[entry][label] for entry, label in draw.items()] for draw in drawn]
        return [({}, {**fixed, **start}), *zip(drawn, [dict(ChainMap(*reversed(x), fixed)) for x in chosen], strict=True)]

    def runs(self, name: str, number: int, hyperparams: dict[str, Any], folder: Path) -> list[Run]:
        """
        :param name: Algorithm of the search
        :param number: Number of a round, from 1
        :param hyperparams: Those of a candidate
        :param folder: Folder of the candidate in this round
        :return: its runs, those of an environment together
        """
        this, algo = self.rounds[number - 1], self.algorithms[name].get("algo", name)
        settings = {**self.settings, "eval_freq": self.eval_freq, "n_eval_episodes": self.eval_episodes, "wandb": "disabled"}
        settings |= {"n_timesteps": this["steps"], "hyperparams": hyperparams}
        folders = {env_id: folder / env_dirname(env_id) for env_id in self.references}
        return [run for env_id in folders for run in make_grid(env_id, [algo], this["seeds"], folders[env_id], **settings)]

    def result(self, runs: Sequence[Run]) -> dict[str, Any]:
        """
        :param runs: Finished runs of a candidate
        :return: its ``score``, the ``standard_error`` of it over seeds, and the mean return in each environment
        """
        ends = [load_evaluations(Path(run.folder, "evaluations.npz"), finished=True)[1][-N_LAST:].mean() for run in runs]
        returns = np.reshape(ends, (len(self.references), -1))
        scores = (returns / np.array(list(self.references.values()))[:, None]).mean(axis=0)
        means = dict(zip(self.references, returns.mean(axis=1).tolist(), strict=True))
        return {"score": float(scores.mean()), "standard_error": standard_error(scores), **means}


def choices_of(entry: str, values: Any) -> dict[Any, dict[str, Any]]:
    """
    :param entry: Name in a space
    :param values: Its choices: a list of values of the entry, or a mapping of names to the entries that each sets
    :return: the entries that each choice sets, by its label
    :raises ValueError: if it is neither
    """
    if values and isinstance(values, list):
        return {value: {entry: value} for value in values}
    if values and isinstance(values, dict) and all(isinstance(entries, dict) for entries in values.values()):
        return values
    raise ValueError(
        f"The choices of {entry!r} must be a list of values, or a mapping of names to the entries that each sets, "
        f"but {values!r} was given."
    )


def load_search(path: Path, **settings: Any) -> Search:
    """
    :param path: YAML file of a search
    :param settings: Further settings of its runs
    :return: the search
    :raises ValueError: if something in the file cannot be used
    """
    try:
        search = Search(**yaml.safe_load(path.read_text()), settings=settings)
        for each in search.rounds:
            check_integer("candidates", each["candidates"], minimum=1)
            # For as many evaluations as the score needs
            check_integer("steps", each["steps"], minimum=N_LAST * search.eval_freq)
        for env_id, reference in search.references.items():
            check_number(f"references: {env_id}", reference, minimum=1e-9)
        for name, algorithm in search.algorithms.items():
            # Checks the environments, the algorithm and the seeds
            search.runs(name, 1, {}, Path())
            _check_entries(name, **{"algo": name, **algorithm})
    except (OSError, yaml.YAMLError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no search that can be run: {type(error).__name__}: {error}") from None
    return search


def _check_entries(name: str, algo: str, space: dict[str, Any], fixed: Any = (), start: Any = ()) -> None:
    zoo_algo = TASKS.get(algo, (algo, {}))[0]
    choices = [entries for entry, values in space.items() for entries in choices_of(entry, values).values()]
    for entry, value in [item for entries in (dict(fixed), dict(start), *choices) for item in entries.items()]:
        check_entry(f"The search of {name} has the entry {entry!r}", entry, value, zoo_algo, ZOO_ENTRIES)


class Round:
    """
    A round of an algorithm's search, with its candidates enqueued.

    :param search: The search
    :param name: Algorithm of the search
    :param number: Number of the round, from 1
    :param folder: Folder of the search
    :raises ValueError: if the folder has another search
    """

    def __init__(self, search: Search, name: str, number: int, folder: Path) -> None:
        self.search, self.name, self.number, self.folder = search, name, number, folder
        self.storage = JournalStorage(JournalFileBackend(str(folder / "search.journal")))
        candidates = list(enumerate(search.candidates(name))) if number == 1 else self._best_before()
        described = {**vars(search), "rounds": search.rounds[:number], "algorithms": search.algorithms[name], "settings": {}}
        with FileLock(folder / "search.lock"):
            self.study = optuna.create_study(
                study_name=f"{name}, round {number}", storage=self.storage, direction="maximize", load_if_exists=True
            )
            before = self.study.user_attrs.get("search", described)
            if changed := [entry for entry in described if described[entry] != before[entry]]:
                raise ValueError(f"{folder} has a search with other {', '.join(changed)} of {name}. Give another `--output`.")
            if not self.study.get_trials(deepcopy=False):
                self.study.set_user_attr("search", described)
                for candidate, (choices, hyperparams) in candidates:
                    self.study.enqueue_trial(choices, user_attrs={"candidate": candidate, "hyperparams": hyperparams})

    def _best_before(self) -> list[tuple[int, tuple[dict[str, Any], dict[str, Any]]]]:
        best = Round(self.search, self.name, self.number - 1, self.folder).standings()
        best = best[: self.search.rounds[self.number - 1]["candidates"]]
        return [(trial.user_attrs["candidate"], (trial.params, trial.user_attrs["hyperparams"])) for trial in best]

    def standings(self) -> list[FrozenTrial]:
        """:return: its candidates that have a score, the best first"""
        trials = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return sorted(trials, key=lambda trial: (-trial.values[0], trial.user_attrs["candidate"]))

    def train(self, jobs: int) -> None:
        """
        Train the candidates, and wait for those of other processes.

        :param jobs: Number of runs of a candidate at once
        """
        while open_trials := self.study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING)):
            if not any(self._train_unless_locked(trial, jobs) for trial in open_trials):
                time.sleep(WAIT)

    def _train_unless_locked(self, trial: FrozenTrial, jobs: int) -> bool:
        """:return: whether no other process trains this candidate, so that it has been trained"""
        candidate = trial.user_attrs["candidate"]
        folder = make_folder(self.folder / f"round-{self.number}" / self.name / f"{candidate:02}")
        lock = FileLock(folder / "lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return False
        try:
            state = self.storage.get_trial(trial._trial_id).state
            if state == TrialState.WAITING:
                self.storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
            if not state.is_finished():
                # One that is running was left by a process that was stopped
                self._train(optuna.Trial(self.study, trial._trial_id), folder, jobs)
        finally:
            lock.release()
        return True

    def _train(self, trial: optuna.Trial, folder: Path, jobs: int) -> None:
        for entry, values in self.search.algorithms[self.name]["space"].items():
            if trial.user_attrs["candidate"]:
                trial.suggest_categorical(entry, list(choices_of(entry, values)))
        runs = self.search.runs(self.name, self.number, trial.user_attrs["hyperparams"], folder)
        failed = run_study(runs, jobs)
        for run_folder, reason in failed.items():
            reason = describe_failure(run_folder, reason)
            print(f"{run_folder} failed, so its candidate has no score: {reason}", file=sys.stderr)
        result = {} if failed else self.search.result(runs)
        for name, value in result.items():
            trial.set_user_attr(name, value)
        self.study.tell(trial, result.get("score"), state=TrialState.FAIL if failed else TrialState.COMPLETE)


def table(rounds: Sequence[Round]) -> pd.DataFrame:
    """
    :param rounds: Rounds of a search
    :return: a row for each candidate of each round, the best of an algorithm first
    """
    columns = ["candidate", "score", "standard_error", "hyperparams"]
    rows = [
        {"algo": each.name, "round": each.number, **{name: trial.user_attrs[name] for name in columns}}
        for each in rounds
        for trial in each.standings()
    ]
    return pd.DataFrame(rows, columns=["algo", "round", *columns]).sort_values(["algo", "round"], ascending=[True, False])


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: Command line; by default, that of the process
    :return: Exit code
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search",
        description="Trains the candidates of each algorithm in rounds, and the best ones again with more steps and seeds. "
        "Started again after a kill or Ctrl-C, it goes on exactly. Started several times, the processes share the candidates.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("search", help=f"{', '.join(sorted(path.stem for path in SEARCHES.glob('*.yml')))}, or a YAML file")
    parser.add_argument("--algos", nargs="+", metavar="ALGO", help="algorithms of the search; default: all")
    add_training_options(parser)
    parser.add_argument("--output", type=Path, help="folder; default: studies/search/NAME")
    args = parser.parse_args(arguments)
    # Before the processes of `--jobs` start
    limit_spinning()
    keep_freed_memory()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = Path(args.search) if args.search.endswith((".yml", ".yaml")) else SEARCHES / f"{args.search}.yml"
    rounds = []
    try:
        check_device(args.device)
        register()
        import_packages(args.gym_packages)
        search = load_search(path, n_threads=args.threads, device=args.device, gym_packages=args.gym_packages)
        names = list(dict.fromkeys(args.algos or search.algorithms))
        if unknown := [name for name in names if name not in search.algorithms]:
            raise ValueError(f"`algos` must be of {', '.join(search.algorithms)}, but {', '.join(unknown)} was given.")
        folder = make_folder(args.output or Path("studies", "search", path.stem))
        for number in range(1, len(search.rounds) + 1):
            for name in names:
                rounds.append(Round(search, name, number, folder))
                rounds[-1].train(args.jobs)
    except ValueError as error:
        sys.exit(f"search: {error}")
    except KeyboardInterrupt:
        sys.exit("search: interrupted; the same command goes on.")
    finally:
        if rounds:
            table(rounds).to_csv(folder / "search.csv", index=False, lineterminator="\n")
    print(table(rounds).drop(columns="hyperparams").to_string(index=False))
    for name, (best, *_) in {each.name: each.standings() for each in rounds if each.standings()}.items():
        print(f"\n# {name}: candidate {best.user_attrs['candidate']}, score {best.values[0]:.3f}")
        print(yaml.safe_dump({name: best.user_attrs["hyperparams"]}, sort_keys=False, width=math.inf), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
