"""
A search of hyperparameters over several tasks at once, with the same budget for each algorithm: one setting has to do for all
tasks. Candidates, rounds and budgets follow from a file that is written before the search.

    python -m benchmarks.search minatar --algos qppo ppo --jobs 2
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import optuna
import pandas as pd
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rl_zoo3.utils import ALGOS

from sb3_qac.commands import HelpFormatter, add_training_options
from sb3_qac.common.allocator import keep_freed_memory
from sb3_qac.common.checks import check_device, check_integer, check_number, check_seed
from sb3_qac.common.files import make_folder, read_json, to_json, write_atomically
from sb3_qac.common.threads import limit_spinning
from sb3_qac.study.catalogue import STUDIES, TASKS
from sb3_qac.study.grid import (
    ZOO_ENTRIES,
    check_entry,
    check_hyperparams,
    describe_failure,
    make_grid,
    resume_hint,
    run_study,
)
from sb3_qac.study.loading import load_evaluations
from sb3_qac.study.manager import import_packages
from sb3_qac.study.run import Run, check_same_run, env_dirname
from sb3_qac.study.statistics import standard_error
from sb3_qac.zoo import register

RUNS_FILE, CANDIDATES_FILE = "search.csv", "candidates.yml"
COLUMNS = ["algo", "candidate", "round", "env", "seed", "steps", "return", "score", "seconds", "commit"]
# Name of what all candidates have in common, in their file
SETTINGS = "search"
# The score of a run is the mean of its last evaluations
N_LAST = 2

Part = TypeVar("Part")


@dataclass(frozen=True)
class Round:
    """
    A round of a search.

    :param candidates: How many candidates are trained: in the first round the preset and others that are drawn, later the best
        ones of the round before
    :param seeds: Seeds of each
    :param steps: Environment steps of each run
    """

    candidates: int
    seeds: list[int]
    steps: int


@dataclass(frozen=True)
class Algorithm:
    """
    An algorithm of a search.

    :param algo: Its name in a study
    :param space: Choices by the name of an entry of RL Zoo's presets. A list has the values of that entry. A mapping has names
        of choices, and the entries that each of them sets.
    :param fixed: Entries that all candidates have
    :param start: Further entries of candidate 0, if a better setting than the preset is known before the search
    """

    algo: str
    space: dict[str, Any]
    fixed: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """
    :param number: Its number; 0 is the preset, with the entries that the search starts from
    :param choices: What was drawn, by the name in the space; for candidate 0 the entries that the search starts from
    :param hyperparams: Entries that replace those of the preset
    """

    number: int
    choices: dict[str, Any]
    hyperparams: dict[str, Any]


@dataclass(frozen=True)
class Search:
    """
    A search, as its file describes it.

    :param references: Return that scores 1, by environment
    :param rounds: Its rounds
    :param algorithms: Algorithms by their name in this search
    :param eval_freq: Environment steps between two evaluations
    :param eval_episodes: Whole episodes of an evaluation, with sampled actions (PQN: greedy)
    :param seed: Seed of the draws. Algorithms with the same choices get the same draws.
    """

    references: dict[str, float]
    rounds: list[Round]
    algorithms: dict[str, Algorithm]
    eval_freq: int = 100_000
    eval_episodes: int = 30
    seed: int = 0

    def candidates(self, name: str) -> list[Candidate]:
        """
        :param name: Algorithm of the search
        :return: the candidates of its first round: its preset, and others drawn from the grid without repetition
        """
        algorithm = self.algorithms[name]
        options = {entry: choices_of(entry, values) for entry, values in algorithm.space.items()}
        sizes = {entry: len(choices) for entry, choices in options.items()}
        candidates = [Candidate(0, algorithm.start, {**algorithm.fixed, **algorithm.start})]
        for number, draw in enumerate(draws_from(sizes, self.rounds[0].candidates - 1, self.seed), 1):
            drawn = {entry: options[entry][index] for entry, index in draw.items()}
            choices = {entry: label for entry, (label, _) in drawn.items()}
            hyperparams = dict(algorithm.fixed)
            for _, entries in drawn.values():
                hyperparams.update(entries)
            candidates.append(Candidate(number, choices, hyperparams))
        return candidates


def draws_from(sizes: dict[str, int], n_draws: int, seed: int) -> list[dict[str, int]]:
    """
    :param sizes: Number of choices of each entry
    :param n_draws: Number of draws
    :param seed: Seed
    :return: different points of the grid, each an index by entry; all points if there are fewer
    """
    if not sizes:
        return []
    distributions: dict[str, BaseDistribution] = {entry: CategoricalDistribution(range(size)) for entry, size in sizes.items()}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
    draws: list[dict[str, int]] = []
    while len(draws) < min(n_draws, math.prod(sizes.values())):
        draw = study.ask(distributions).params
        if draw not in draws:
            draws.append(draw)
    return draws


def choices_of(entry: str, values: Any) -> list[tuple[Any, dict[str, Any]]]:
    """
    :param entry: Name in a space
    :param values: Its choices, a list or a mapping
    :return: each choice's label, and the entries that it sets
    :raises ValueError: if it is neither
    """
    if values and isinstance(values, list):
        return [(value, {entry: value}) for value in values]
    if values and isinstance(values, dict) and all(isinstance(entries, dict) for entries in values.values()):
        return list(values.items())
    raise ValueError(
        f"The choices of {entry!r} must be a list of values, or a mapping of names to the entries that each sets, "
        f"but {values!r} was given."
    )


# ---- the file ----


def search_file(name: str) -> Path:
    """
    :param name: Name of a search
    :return: path of its file
    :raises ValueError: if there is none
    """
    path = Path(__file__).with_name("searches") / f"{name}.yml"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in path.parent.glob("*.yml")))
        raise ValueError(f"There is no search {name!r}. There are {names}; `--conf-file` takes a file of your own.")
    return path


def load_search(path: Path) -> Search:
    """
    :param path: YAML file of a search
    :return: the search
    :raises ValueError: if there is no such file, or something in it cannot be used; the message names it
    """
    register()
    if not path.is_file():
        raise ValueError(f"There is no file {path} with a search.")
    try:
        content = yaml.safe_load(path.read_text())
        if not isinstance(content, dict):
            raise TypeError("it has no entries, such as `references`, `rounds` and `algorithms`")
        for name, kind in {"rounds": list, "algorithms": dict, "references": dict}.items():
            if not isinstance(content[name], kind):
                what = "a list" if kind is list else "a mapping of names"
                raise TypeError(f"`{name}` must be {what}, but {content[name]!r} was given.")
            for entry in content[name]:
                if kind is dict and not isinstance(entry, str):
                    raise TypeError(f"the names in `{name}` must be text, but {entry!r} was given.")
        rounds = [_part(Round, entries) for entries in content["rounds"]]
        algorithms = {name: _part(Algorithm, entries, algo=name) for name, entries in content["algorithms"].items()}
        search = _part(Search, {**content, "rounds": rounds, "algorithms": algorithms})
        check_search(search)
    except KeyError as error:
        raise ValueError(f"{path} has no entry {error}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the file of a search: {error}") from None
    return search


def _part(kind: type[Part], entries: dict[str, Any], **defaults: Any) -> Part:
    """:return: a part of a search, or the search itself, from its entries in the file"""
    if not isinstance(entries, dict):
        raise TypeError(f"{kind.__name__} must be a mapping of its entries, but {entries!r} was given.")
    entries = {**defaults, **entries}
    known = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    for name in entries:
        if name not in known:
            raise TypeError(f"{kind.__name__} has no entry {name!r}. Its entries are {', '.join(known)}.")
    for name, entry in known.items():
        if name not in entries and entry.default is entry.default_factory is MISSING:
            raise TypeError(f"{kind.__name__} has no entry {name!r}, which it needs.")
    return kind(**entries)


def check_search(search: Search) -> None:
    """
    :param search: A search
    :raises ValueError: if something in it cannot be used; the message names it
    """
    for name, algorithm in search.algorithms.items():
        if name == SETTINGS:
            raise ValueError(f"An algorithm of a search must have another name than {name!r}, which {CANDIDATES_FILE} needs.")
        check_entries(name, algorithm)
    check_references(search.references)
    for name, value in {"eval_freq": search.eval_freq, "eval_episodes": search.eval_episodes}.items():
        check_integer(name, value, minimum=1)
    check_seed("seed", search.seed)
    for name in ("references", "algorithms", "rounds"):
        if not getattr(search, name):
            raise ValueError(f"A search has at least one {name[:-1]}, but `{name}` is empty.")
    for each in search.rounds:
        check_integer("candidates", each.candidates, minimum=1)
        # For as many evaluations as the score needs
        check_integer("steps", each.steps, minimum=N_LAST * search.eval_freq)
        if not isinstance(each.seeds, list) or not each.seeds:
            raise ValueError(f"`seeds` of a round must be a list with at least one seed, but {each.seeds!r} was given.")
        for seed in each.seeds:
            check_seed("seeds", seed)


def check_references(references: dict[str, float]) -> None:
    """
    :param references: Reference return of each environment of a search
    :raises ValueError: if one is not a positive number, or its name is that of several environments
    """
    for env_id, reference in references.items():
        if env_id in STUDIES:
            names = ", ".join(STUDIES[env_id].env_ids)
            raise ValueError(
                f"`references` must have environments, but {env_id} is the name of a study. Name its own: {names}."
            )
        check_number(f"references: {env_id}", reference)
        if reference == 0:
            raise ValueError(f"The reference return of {env_id} is 0, but returns are divided by it.")


def check_entries(name: str, algorithm: Algorithm) -> None:
    """
    :param name: Name of an algorithm in a search
    :param algorithm: The algorithm
    :raises ValueError: if a study does not know it, or it does not have an argument that the search sets
    """
    for part in ("space", "fixed", "start"):
        if not isinstance(getattr(algorithm, part), dict):
            raise ValueError(f"`{part}` of {name} must be a mapping of entries, but {getattr(algorithm, part)!r} was given.")
    if not isinstance(algorithm.algo, str):
        raise ValueError(f"`algo` of {name} must be the name of an algorithm, but {algorithm.algo!r} was given.")
    algo = TASKS.get(algorithm.algo, (algorithm.algo, {}))[0]
    if algo not in ALGOS:
        known = ", ".join([*TASKS, *sorted(ALGOS)])
        raise ValueError(f"The search of {name} is one of {algorithm.algo!r}, which is no algorithm. There are {known}.")
    choices = [choice for entry, values in algorithm.space.items() for _, choice in choices_of(entry, values)]
    for entry, value in [item for entries in (algorithm.fixed, algorithm.start, *choices) for item in entries.items()]:
        check_entry(f"The search of {name} has the entry {entry!r}", entry, value, algo, ZOO_ENTRIES)


# ---- the trainings ----


@dataclass(frozen=True)
class Trial:
    """
    A candidate in a round.

    :param algorithm: Name of the algorithm in the search
    :param round: Number of the round, from 1
    :param candidate: The candidate
    :param runs: Its runs, those of an environment together
    :param rows: Row of each run in the table, if it has been started
    :param returns: Return of each run, the mean of its last evaluations; nan if it has not finished; shape (n_envs, n_seeds)
    :param scores: The same, divided by the reference returns
    """

    algorithm: str
    round: int
    candidate: Candidate
    runs: list[Run]
    rows: list[dict[str, Any] | None]
    returns: np.ndarray
    scores: np.ndarray

    @property
    def pending(self) -> list[Run]:
        """Its runs that have not finished."""
        return [run for run, of_run in zip(self.runs, self.returns.flat, strict=True) if math.isnan(of_run)]

    @property
    def mean(self) -> float:
        """Score of the candidate; nan if one of its runs has not finished."""
        return float(self.scores.mean())

    @property
    def error(self) -> float:
        """Standard error of the score over seeds; nan if there is only one."""
        return standard_error(self.scores.mean(axis=0))


def trials_of(search: Search, name: str, number: int, folder: Path, **settings: Any) -> list[Trial]:
    """
    :param search: The search
    :param name: Algorithm of the search
    :param number: Number of a round, from 1
    :param folder: Folder of the search
    :param settings: Further settings of its runs
    :return: all candidates in this round, trained or not
    """
    settings = {**settings, "eval_freq": search.eval_freq, "n_eval_episodes": search.eval_episodes, "wandb": "disabled"}
    this, algo = search.rounds[number - 1], search.algorithms[name].algo
    references = np.array(list(search.references.values()))
    table = read_table(folder)
    trials = []
    for candidate in search.candidates(name):
        part = folder / f"round-{number}" / name / f"{candidate.number:02}"
        runs = []
        for env_id in search.references:
            grid = make_grid(
                env_id,
                [algo],
                this.seeds,
                part / env_dirname(env_id),
                hyperparams=candidate.hyperparams,
                n_timesteps=this.steps,
                **settings,
            )
            runs += [replace(run, name=f"{name}-{candidate.number}_seed-{run.seed}") for run in grid]
        rows = []
        for run in runs:
            row = {"algo": name, "candidate": candidate.number, "round": number, "env": run.env_id, "seed": run.seed}
            in_table, in_folder = table.get(tuple(row.values())), row_of(run, row)
            # Unfinished here, it may have been finished on the machine that wrote the table
            known = [x for x in (in_folder, in_table) if x is not None]
            rows.append(min(known, key=lambda x: math.isnan(x["return"]), default=None))
        returns = np.array([row["return"] if row else math.nan for row in rows]).reshape(len(references), -1)
        trials.append(Trial(name, number, candidate, runs, rows, returns, returns / references[:, None]))
    return trials


def row_of(run: Run, row: dict[str, Any]) -> dict[str, Any] | None:
    """
    :param run: A run
    :param row: What its row in the table begins with
    :return: its row, without a score; None if its folder has no run. The return is the mean of its last evaluations, nan if it
        has not finished or they are gone.
    """
    settings, status = (read_json(Path(run.folder, file)) for file in ("run.json", "status.json"))
    if not settings:
        return None
    results: Any = load_evaluations(Path(run.folder, "evaluations.npz"), finished=True)[1] if run.finished else ()
    return {
        **row,
        "steps": status.get("steps", 0),
        "return": float(results.mean(axis=1)[-N_LAST:].mean()) if len(results) else math.nan,
        "seconds": round(status.get("seconds", 0.0)),
        "commit": settings.get("commit"),
    }


def read_table(folder: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """
    The table stands for runs whose folders are not there, such as those that another machine has trained.

    :param folder: Folder of a search
    :return: rows of its table, by algorithm, candidate, round, environment and seed; the return of an unfinished run is nan
    :raises ValueError: if it is not a table of a search, is cut off, or has two results of a run. An unfinished row next to a
        finished one of the same run does not count
    """
    path = folder / RUNS_FILE
    if not path.is_file() or not path.read_text().strip():
        return {}
    try:
        # A commit such as 1234e56 or 0012345 is no number
        table = pd.read_csv(path, dtype={"algo": str, "env": str, "commit": str}, float_precision="round_trip")
    except ValueError as error:
        raise ValueError(f"{path} is not the table of a search: {str(error).strip()}") from None
    if missing := [name for name in COLUMNS if name not in table]:
        raise ValueError(f"{path} is not the table of a search: it has no column {', '.join(missing)}.")
    kinds = {**dict.fromkeys(["candidate", "round", "seed", "steps", "seconds"], "i"), "return": "if", "score": "if"}
    if wrong := [name for name, kind in kinds.items() if len(table) and table[name].dtype.kind not in kind]:
        reason = f"a row is incomplete, or has no number as {', '.join(wrong)}"
        raise ValueError(f"{path} is not the table of a search: {reason}.")
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    # Of a run that was finished on another machine, an older table has an unfinished row
    of_run = pd.MultiIndex.from_frame(table[["algo", "candidate", "round", "env", "seed"]])
    superseded = table["return"].isna() & of_run.isin(of_run[table["return"].notna()])
    for row in table[~superseded].drop_duplicates().to_dict("records"):
        key = (row["algo"], row["candidate"], row["round"], row["env"], row["seed"])
        if rows.setdefault(key, row) is not row:
            raise ValueError(f"{path} has two different rows of {', '.join(map(str, key))}. Remove one of them.")
    return rows


def best_of(trials: Sequence[Trial]) -> list[Trial]:
    """
    :param trials: Trials of a round
    :return: those that have a score, the best first
    """
    return sorted((trial for trial in trials if not math.isnan(trial.mean)), key=lambda trial: -trial.mean)


def run_search(search: Search, names: Sequence[str], folder: Path, jobs: int = 1, **settings: Any) -> dict[str, str]:
    """
    Train the rounds of a search, and write its files. After Ctrl-C the same call resumes it. Runs that are finished in the
    table of its folder are not trained again, even without their own folders: the two files carry a search to another machine.

    :param search: The search
    :param names: Algorithms of the search
    :param folder: Folder for everything that it writes
    :param jobs: Number of runs at once, each in its own process
    :param settings: Further settings of its runs, such as ``n_threads`` and ``device``
    :return: what went wrong, by the folder of the run
    :raises ValueError: if there is no such algorithm, or the folder has a search with other settings
    :raises KeyboardInterrupt: after Ctrl-C, when a checkpoint has been written
    """
    unknown = [name for name in names if name not in search.algorithms]
    if unknown:
        raise ValueError(f"The search has no algorithm {', '.join(unknown)}. It has {', '.join(search.algorithms)}.")
    # Before `write_search`, which would describe the trained runs by the other settings
    for trial in started_trials(search, search.algorithms, folder):
        for run in trial.runs:
            check_same_run(run)
        # Also of those that are finished, because the candidates of a search are compared on one preset
        check_hyperparams(trial.runs)
    check_same_candidates(search, folder)
    make_folder(folder)
    # Before the first run, because the folders of the runs have only the numbers of the candidates
    write_atomically(folder / CANDIDATES_FILE, candidates_as_yaml(search).encode())
    failed: dict[str, str] = {}
    for number in range(1, len(search.rounds) + 1):
        runs = []
        for name in names:
            trials = trials_of(search, name, number, folder, **settings)
            if number > 1:
                best = best_of(trials_of(search, name, number - 1, folder, **settings))
                trials = [trials[trial.candidate.number] for trial in best[: search.rounds[number - 1].candidates]]
            runs += [run for trial in trials for run in trial.pending]
        try:
            failed |= run_study(runs, jobs)
        finally:
            write_search(search, folder)
    return failed


def check_same_candidates(search: Search, folder: Path) -> None:
    """
    :param search: The search
    :param folder: Its folder
    :raises ValueError: if the folder has the table of a search with other candidates, or with runs of another length, of
        another algorithm or with other evaluations
    """
    if not (table := read_table(folder)):
        return
    before, now = read_candidates(folder), yaml.safe_load(candidates_as_yaml(search))
    if not before:
        raise ValueError(
            f"{folder} has {RUNS_FILE}, but no {CANDIDATES_FILE}, which says what its candidates were. "
            "Add that file, or choose another `--output`."
        )
    # Older files do not have them
    settings_before, settings = before.get(SETTINGS, now[SETTINGS]), now[SETTINGS]
    for (name, candidate, number, env_id, seed), row in table.items():
        run = f"{name}, candidate {candidate}, round {number}, {env_id}, seed {seed}"
        message, advice = f"{folder} has the table of a search with other settings: {run}", "Choose another `--output`."
        this = search.rounds[number - 1] if 1 <= number <= len(search.rounds) else None
        if this is None or name not in search.algorithms or env_id not in search.references or seed not in this.seeds:
            raise ValueError(f"{message} is not in the search. {advice}")
        if candidate not in now[name] or before.get(name, {}).get(candidate) != now[name][candidate]:
            raise ValueError(f"{message} has other hyperparameters in the search. {advice}")
        if not math.isnan(row["return"]) and row["steps"] < this.steps:
            steps = f"ended after {row['steps']:,} steps, and has {this.steps:,} in the search"
            raise ValueError(f"{message} {steps}. {advice}")
        for entry, value in settings.items():
            kept = settings_before.get(entry)
            if isinstance(value, dict):
                key = name if entry == "algo" else number
                value, kept = value[key], (kept or {}).get(key)
            if value != kept:
                raise ValueError(f"{message} had {entry} {kept!r}, and has {value!r} in the search. {advice}")


def read_candidates(folder: Path) -> dict[str, Any]:
    """
    :param folder: Folder of a search
    :return: content of its file with the candidates; empty if there is none
    :raises ValueError: if it is not such a file
    """
    path = folder / CANDIDATES_FILE
    try:
        content = yaml.safe_load(path.read_text()) if path.is_file() else {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not the file of candidates: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(entries, dict) for entries in content.values()):
        raise ValueError(f"{path} is not the file of candidates: it has no candidates by algorithm and number.")
    return content


# ---- the results ----


def candidates_as_yaml(search: Search) -> str:
    """
    :param search: The search
    :return: the hyperparameters of its candidates, by algorithm and number, after what else their results depend on
    """
    settings = {
        "eval_freq": search.eval_freq,
        "eval_episodes": search.eval_episodes,
        "steps": {number: each.steps for number, each in enumerate(search.rounds, 1)},
        "algo": {name: algorithm.algo for name, algorithm in search.algorithms.items()},
    }
    candidates = {
        name: {candidate.number: candidate.hyperparams for candidate in search.candidates(name)} for name in search.algorithms
    }
    return yaml.safe_dump({SETTINGS: settings, **candidates}, sort_keys=False, width=math.inf)


def write_search(search: Search, folder: Path) -> None:
    """
    Write a row for each run that was started.

    :param search: The search
    :param folder: Its folder
    """
    rows = []
    for trial in started_trials(search, search.algorithms, folder):
        for row, score in zip(trial.rows, trial.scores.flat, strict=True):
            if row is not None:
                rows.append({**row, "score": score})
    write_atomically(folder / RUNS_FILE, pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False, lineterminator="\n").encode())


def started_trials(search: Search, names: Iterable[str], folder: Path) -> Iterator[Trial]:
    """
    :param search: The search
    :param names: Algorithms of the search
    :param folder: Its folder
    :return: the trials of which a run was started, in the order of algorithms, rounds and candidates
    """
    for name, number in itertools.product(names, range(1, len(search.rounds) + 1)):
        for trial in trials_of(search, name, number, folder):
            if any(trial.rows):
                yield trial


def standings(search: Search, name: str, folder: Path) -> list[Trial]:
    """
    :param search: The search
    :param name: Algorithm of the search
    :param folder: Its folder
    :return: the last trial of each candidate, the best first: those of a later round before those of an earlier one, and in a
        round those without a score last
    """
    last = {trial.candidate.number: trial for trial in started_trials(search, [name], folder)}
    return sorted(last.values(), key=lambda trial: (-trial.round, math.isnan(trial.mean), -trial.mean))


def standings_table(search: Search, name: str, trials: Sequence[Trial]) -> Table:
    """
    :param search: The search
    :param name: Algorithm of the search
    :param trials: Its standings
    :return: table with the scores of each candidate
    """
    table = Table(title=name, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = [env_id.rpartition("/")[2] for env_id in search.references]
    for heading in ("candidate", "round", *names, "score", "error"):
        table.add_column(heading)
    for trial in trials:
        numbers = [*trial.scores.mean(axis=1), trial.mean, trial.error]
        shown = ["" if math.isnan(number) else f"{number:.3f}" for number in numbers]
        table.add_row(str(trial.candidate.number), str(trial.round), *shown)
    return table


def choices_as_text(trials: Sequence[Trial]) -> str:
    """
    :param trials: Standings of an algorithm
    :return: what was drawn for each candidate, a line for each
    """
    lines = []
    for trial in trials:
        choices = ", ".join(f"{entry} {label}" for entry, label in trial.candidate.choices.items())
        lines.append(f"{trial.candidate.number}: {choices or 'the preset'}\n")
    return "".join(lines)


def best_as_yaml(name: str, trials: Sequence[Trial]) -> str:
    """
    :param name: Algorithm of the search
    :param trials: All of its trials
    :return: the entries of the best candidate that replace those of the preset, as YAML; empty if none has a score. If all of
        the last round failed, it is the best of the round before.
    """
    scored = [trial for trial in trials if not math.isnan(trial.mean)]
    if not scored:
        return ""
    best = max(scored, key=lambda trial: (trial.round, trial.mean))
    comment = f"# {name}: candidate {best.candidate.number}, score {best.mean:.3f} in round {best.round}\n"
    return comment + yaml.safe_dump({name: best.candidate.hyperparams}, sort_keys=False, width=math.inf)


def as_row(search: Search, trial: Trial) -> dict[str, Any]:
    """
    :param search: The search
    :param trial: One of its trials
    :return: the trial as plain data, with None where there is no score
    """
    row = {"candidate": trial.candidate.number, "round": trial.round, "hyperparams": trial.candidate.hyperparams}
    numbers = [*trial.scores.mean(axis=1), trial.mean, trial.error]
    names = [*search.references, "score", "standard_error"]
    return row | {name: None if math.isnan(number) else float(number) for name, number in zip(names, numbers, strict=True)}


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: Command line; by default, that of the process
    :return: Exit code, 1 if a run failed
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search",
        description="Trains the candidates of each algorithm in rounds, and the best ones again with more steps and seeds. "
        "Run it again after a kill or Ctrl-C: it resumes unfinished runs exactly and skips finished ones. On another machine, "
        "search.csv and candidates.yml stand for the finished runs.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("name", help="minatar, lunarlander, or with --conf-file a name of your own")
    parser.add_argument("--algos", nargs="+", metavar="ALGO", help="algorithms of the search; default: all")
    parser.add_argument("--conf-file", type=Path, help="YAML file of the search; default: that of NAME in this package")
    add_training_options(parser)
    parser.add_argument("--output", type=Path, help="folder; default: studies/search/NAME")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON at the end")
    args = parser.parse_args(arguments)

    limit_spinning()

    folder = args.output or Path("studies", "search", args.name)
    # Sets this process; the processes of `--jobs` do it when they start
    keep_freed_memory()
    try:
        for name in ("jobs", "threads"):
            check_number(name, getattr(args, name), minimum=1)
        check_device(args.device)
        import_packages(args.gym_packages)
        search = load_search(args.conf_file or search_file(args.name))
    except ValueError as error:
        sys.exit(f"search: {error}")
    names = list(dict.fromkeys(args.algos or search.algorithms))
    try:
        settings = {"n_threads": args.threads, "device": args.device, "gym_packages": args.gym_packages}
        failed = run_search(search, names, folder, args.jobs, **settings)
    except KeyboardInterrupt:
        runs = [run for trial in started_trials(search, names, folder) for run in trial.runs]
        sys.exit(f"search: interrupted; the same command {resume_hint(runs)}.")
    except ValueError as error:
        sys.exit(f"search: {error}")
    print_standings(search, names, folder, args.json)
    for run_folder, reason in failed.items():
        print(f"{run_folder} failed, so its candidate has no score: {describe_failure(run_folder, reason)}", file=sys.stderr)
    return 1 if failed else 0


def print_standings(search: Any, names: list[str], folder: Path, as_json: bool) -> None:
    """
    :param search: The search
    :param names: Algorithms of the search
    :param folder: Its folder
    :param as_json: Whether to print JSON instead of tables and the best candidates as YAML
    """

    trials = {name: standings(search, name, folder) for name in names}
    if as_json:
        print(to_json({name: [as_row(search, trial) for trial in of_name] for name, of_name in trials.items()}))
        return
    for name, of_name in trials.items():
        Console().print(standings_table(search, name, of_name))
        print(choices_as_text(of_name))
        print(best_as_yaml(name, list(started_trials(search, [name], folder))))


if __name__ == "__main__":
    sys.exit(main())
