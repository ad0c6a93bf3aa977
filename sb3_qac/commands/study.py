"""``python -m sb3_qac study``: a grid of runs."""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sb3_qac.commands import HelpFormatter, add_training_options
from sb3_qac.common.checks import check_device, check_number
from sb3_qac.common.files import presets, read_json
from sb3_qac.common.process import idle_cores
from sb3_qac.study.catalogue import SETTINGS, STUDIES, TASKS, field_name, is_study_file, study_of


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    study = commands.add_parser(
        "study",
        help="train a grid of algorithms and seeds, to compare them",
        description="Trains each algorithm with each seed. Run it again after a kill or Ctrl-C: "
        "it resumes unfinished runs exactly and skips finished ones, and those that another process or machine trains.",
        epilog="Example: python -m sb3_qac study pong --jobs 2 --stop-return 18. What a run took on one core, and keeps on "
        f"the disk: {'; '.join(f'{name} {known.cost}' for name, known in STUDIES.items())}.",
        formatter_class=HelpFormatter,
    )
    study.add_argument(
        "env",
        help=f"environment; one of {', '.join(STUDIES)}, which may change the defaults below; or a YAML "
        f"file of your own with environments, groups (names of algorithms; a name of your own has algo and hyperparams), "
        f"{', '.join(SETTINGS)}, which {presets('studies/cartpole')} explains",
    )
    study.add_argument(
        "--algos",
        nargs="+",
        metavar="ALGO",
        help="all-action, all-action-baseline, beta-loo (or the course documents' names, which their folders then have: "
        "task1, task2, beta1), qa2c (its preset as it is), qppo, qppo-sampled, pqn, algorithms of RL Zoo, rungs of the "
        "ladder, or rows of the ablation; default: a2c all-action all-action-baseline",
    )
    study.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="seeds of each algorithm; default: 0 100")
    study.add_argument("--steps", type=int, help="environment steps of each run; default: as in the preset")
    study.add_argument("--stop-return", type=float, help="stop a run when an evaluation reaches this mean return")
    study.add_argument(
        "--eval-freq", type=int, help="environment steps between two evaluations; default: 300,000, or a quarter of the run"
    )
    study.add_argument(
        "--eval-from",
        type=float,
        metavar="RETURN",
        help="no evaluation until the last training episodes, as many as an evaluation has, reach this mean return; if they "
        "never do, one at the end",
    )
    study.add_argument("--eval-episodes", type=int, help="whole episodes in an evaluation, played in parallel; default: 30")
    study.add_argument(
        "--deterministic",
        action="store_true",
        default=None,
        help="evaluate with the most probable actions instead of sampled ones",
    )
    study.add_argument(
        "--stock",
        action="store_true",
        help="use SB3's Atari environments, and its network where the preset names no other, instead of the faster ones",
    )
    study.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="precision of the faster network for Atari games"
    )
    study.add_argument("--conf-file", help="YAML file with hyperparameters for all algorithms; default: each algorithm's own")
    study.add_argument(
        "-params",
        "--hyperparams",
        nargs="+",
        metavar="NAME:VALUE",
        default=[],
        help="entries that replace those of the presets of all algorithms, as in RL Zoo: -params n_envs:16 normalize:True",
    )
    add_training_options(study)
    study.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="address of a Ray cluster to run on instead, auto for the one of this machine; needs the extra ray, "
        "and an output folder that all machines of the cluster share",
    )
    study.add_argument(
        "--wandb",
        choices=("offline", "online", "disabled"),
        help="mode of Weights & Biases; default: offline, which needs no account",
    )
    study.add_argument(
        "--new-episodes",
        action="store_true",
        help="resume unfinished runs with new episodes, where the state of their environments cannot be restored: this is not "
        "exact, and the report says so",
    )
    study.add_argument("--output", type=Path, help="folder; default: studies/ENV")
    study.add_argument("--json", action="store_true", help="print the state of each run as JSON at the end")
    study.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code, 1 if a run failed
    """
    from sb3_qac.common.process import keep_freed_memory, limit_spinning

    # Before PyTorch is imported
    limit_spinning()
    from sb3_qac.common.files import make_folder
    from sb3_qac.study.grid import check_ray_address, resume_hint, run_study

    folder = args.output or Path("studies", Path(args.env).stem if is_study_file(args.env) else args.env)
    try:
        if args.ray is not None:
            check_ray_address(args.ray)
            if args.threads == "auto":
                raise ValueError("`--threads` must be a number with `--ray`, as 'auto' is about this machine only.")
        runs = grid_of(args, folder)
        make_folder(folder)
        print_notes(args, [run for run in runs if not run.finished])
    except ValueError as error:
        sys.exit(f"study: {error}")
    # Sets this process; the processes of `--jobs` do it when they start
    keep_freed_memory()
    try:
        failed = run_study(runs, args.jobs, args.ray, args.json)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the same command {resume_hint(runs)}") from None
    except ImportError as error:
        sys.exit(f"study: {error}. Install what --ray needs with: pip install '.[ray]', in the checkout")
    except (ValueError, ConnectionError) as error:
        sys.exit(f"study: {error}")
    print_results(runs, failed, args.json)
    if not args.json:
        print_next_commands(runs, folder)
    return 1 if failed else 0


def print_notes(args: argparse.Namespace, runs: Sequence[Any]) -> None:
    """
    :param args: Command line
    :param runs: Runs of the study that are not finished
    """
    from sb3_qac.study.grid import notes

    if runs and args.env in STUDIES and args.algos is None and args.steps is None:
        print(f"study: {len(runs)} runs. One took {study_of(args.env).cost}, on one core.", file=sys.stderr)
    # Variants of an algorithm have the same
    for line in dict.fromkeys(notes(runs)):
        print(f"study: {line}", file=sys.stderr)


def print_next_commands(runs: Sequence[Any], folder: Path) -> None:
    """
    :param runs: Runs of the study, of which those that are finished count
    :param folder: Folder of the study
    """
    finished = [run for run in runs if run.finished]
    if not finished:
        return
    commands = [f"python -m sb3_qac report {shlex.quote(str(folder))}"]
    drawn = next((run for run in finished if _draws_images(run.env_id)), None)
    if drawn is not None:
        commands.append(f"python -m sb3_qac video {shlex.quote(drawn.folder)}")
    if any(run.wandb == "offline" for run in finished):
        below = "/*" * len(Path(finished[0].folder).relative_to(folder).parts)
        commands.append(f"wandb sync {shlex.quote(str(folder))}{below}/wandb/latest-run")
    print("Next:", "\n      ".join(commands))


def _draws_images(env_id: str) -> bool:
    import gymnasium as gym
    from gymnasium.envs.registration import load_env_creator

    entry_point = gym.spec(env_id).entry_point
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    return "rgb_array" in getattr(creator, "metadata", {}).get("render_modes", [])


def print_results(runs: Sequence[Any], failed: dict[str, str], as_json: bool) -> None:
    """
    :param runs: Runs of the study
    :param failed: What went wrong, by the folder of the run
    :param as_json: Whether to print the state of every run as JSON, instead of a line for each finished run
    """
    from sb3_qac.common.files import to_json
    from sb3_qac.study.grid import describe_failure
    from sb3_qac.study.progress import status_of, summary

    if as_json:
        # The training return is NaN before the first episode has ended
        print(to_json({run.folder: status_of(run) for run in runs}))
    else:
        for line in summary(runs):
            print(line)
    for run_folder, reason in failed.items():
        print(f"{run_folder} failed: {describe_failure(run_folder, reason)}", file=sys.stderr)


def grid_of(args: argparse.Namespace, folder: Path) -> list[Any]:
    """
    :param args: Command line of ``study``
    :param folder: Folder of the study
    :return: its runs
    :raises ValueError: for a value that is not allowed
    """
    from sb3_qac.study.grid import make_grid, with_evaluations

    # By the names of the options; the settings of a run have others
    for name in ("jobs", "threads", "eval_freq", "eval_episodes", "steps"):
        if (value := getattr(args, name)) not in (None, "auto"):
            check_number(name, value, minimum=1)
    if args.ray is None:
        # With Ray each run checks it on its machine
        check_device(args.device)
    if args.stock and args.dtype != "float32":
        raise ValueError(f"`--dtype` is {args.dtype!r}, but with `--stock` networks are always in float32.")
    given = {name: value for name, value in vars(args).items() if value is not None}
    asked = argparse.Namespace(**{**vars(study_of(args.env)), **given})
    runs = make_grid(
        asked.env,
        asked.algos,
        asked.seeds,
        folder,
        args.conf_file,
        hyperparams_given(args.hyperparams, asked.algos, {**TASKS, **asked.tasks}),
        n_timesteps=asked.steps,
        stop_return=asked.stop_return,
        eval_freq=asked.eval_freq,
        eval_from=asked.eval_from,
        n_eval_episodes=asked.eval_episodes,
        deterministic=asked.deterministic,
        native=not asked.stock,
        dtype=None if asked.stock else asked.dtype,
        n_threads=1 if asked.threads == "auto" else asked.threads,
        device=asked.device,
        wandb=asked.wandb,
        gym_packages=args.gym_packages,
        new_episodes=args.new_episodes,
    )
    if asked.threads == "auto":
        runs = with_threads(runs, args.jobs)
    return with_evaluations(runs) if args.eval_freq is None else runs


def with_threads(runs: Sequence[Any], n_jobs: int) -> list[Any]:
    """
    :param runs: Runs
    :param n_jobs: Number of runs at once
    :return: the same with as many threads as cores are idle, at most two (more were not measured), or with those of an earlier
        start: with another number the sums are rounded otherwise, so the run would not be resumed exactly
    """
    idle = min(max(idle_cores() // n_jobs, 1), 2)
    earlier = [read_json(Path(run.folder, "run.json")) for run in runs]
    return [
        dataclasses.replace(run, n_threads=settings.get("n_threads", idle))
        for run, settings in zip(runs, earlier, strict=True)
    ]


def hyperparams_given(entries: Sequence[str], algos: Sequence[str], tasks: dict[str, Any]) -> dict[str, Any]:
    """
    :param entries: Entries of ``-params``
    :param algos: Requested algorithms
    :param tasks: Names with entries of their own
    :return: the entries, evaluated as in RL Zoo
    :raises ValueError: if one cannot be evaluated or kept, or makes an algorithm another one than its name says
    """
    from rl_zoo3.utils import StoreDict

    given: dict[str, Any] = {}
    for entry in entries:
        parsed = argparse.Namespace()
        try:
            StoreDict([], "entry")(argparse.ArgumentParser(), parsed, [entry])
            json.dumps(parsed.entry)
        except Exception as error:
            raise ValueError(
                f"`-params` takes NAME:VALUE with a value of Python, such as gamma:0.9 or policy:\"'CnnPolicy'\", but "
                f"{entry!r} was given: {error}. Classes are named in a text: policy_kwargs:\"'dict(activation_fn=nn.ReLU)'\"."
            ) from None
        given |= parsed.entry
    for algo in algos:
        if fixed := given.keys() & tasks.get(field_name(algo), ("", {}))[1]:
            raise ValueError(f"`-params` has {', '.join(sorted(fixed))}, which the name {algo} already sets.")
    return given
