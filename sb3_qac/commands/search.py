"""``python -m sb3_qac search``: a search of hyperparameters over several tasks at once."""

import argparse
import sys
from pathlib import Path
from typing import Any

from sb3_qac.commands import HelpFormatter, add_training_options
from sb3_qac.common.checks import check_device, check_number


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    search = commands.add_parser(
        "search",
        help="search hyperparameters: one setting for several tasks, with the same budget for each algorithm",
        description="Trains the candidates of each algorithm in rounds, and the best ones again with more steps and seeds. "
        "Run it again after a kill or Ctrl-C: it resumes unfinished runs exactly and skips finished ones. On another machine, "
        "search.csv and candidates.yml stand for the finished runs.",
        epilog="Example: python -m sb3_qac search minatar --algos qppo ppo --jobs 2",
        formatter_class=HelpFormatter,
    )
    search.add_argument("name", help="minatar, lunarlander, or with --conf-file a name of your own")
    search.add_argument("--algos", nargs="+", metavar="ALGO", help="algorithms of the search; default: all")
    search.add_argument("--conf-file", type=Path, help="YAML file of the search; default: that of NAME in this package")
    add_training_options(search)
    search.add_argument("--output", type=Path, help="folder; default: studies/search/NAME")
    search.add_argument("--json", action="store_true", help="print the scores as JSON at the end")
    search.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code, 1 if a run failed
    """
    from sb3_qac.common.threads import limit_spinning

    # Before PyTorch is imported
    limit_spinning()
    from sb3_qac.common.allocator import keep_freed_memory
    from sb3_qac.study.grid import reason_of_failure, what_is_resumed
    from sb3_qac.study.manager import import_packages
    from sb3_qac.study.search import load_search, run_search, search_file, started_trials

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
        raise KeyboardInterrupt(f"the same command {what_is_resumed(runs)}") from None
    except ValueError as error:
        sys.exit(f"search: {error}")
    print_standings(search, names, folder, args.json)
    for run_folder, reason in failed.items():
        print(f"{run_folder} failed, so its candidate has no score: {reason_of_failure(run_folder, reason)}", file=sys.stderr)
    return 1 if failed else 0


def print_standings(search: Any, names: list[str], folder: Path, as_json: bool) -> None:
    """
    :param search: The search
    :param names: Algorithms of the search
    :param folder: Its folder
    :param as_json: Whether to print JSON instead of tables and the best candidates as YAML
    """
    from rich.console import Console

    from sb3_qac.common.files import to_json
    from sb3_qac.study.search import as_row, best_as_yaml, choices_as_text, standings, standings_table, started_trials

    trials = {name: standings(search, name, folder) for name in names}
    if as_json:
        print(to_json({name: [as_row(search, trial) for trial in of_name] for name, of_name in trials.items()}))
        return
    for name, of_name in trials.items():
        Console().print(standings_table(search, name, of_name))
        print(choices_as_text(of_name))
        print(best_as_yaml(name, list(started_trials(search, [name], folder))))
