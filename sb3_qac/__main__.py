"""Command line: ``python -m sb3_qac``."""

import argparse
import json
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym

from sb3_qac import __version__
from sb3_qac.common.checkpoints import read_json
from sb3_qac.common.checks import check_number
from sb3_qac.doctor import examine
from sb3_qac.study.benchmark import run_benchmark, tables, write_report
from sb3_qac.study.catalogue import RUNGS, STUDIES, study_of
from sb3_qac.zoo import ALGORITHMS, presets, register

ZOO_COMMANDS = ("train", "enjoy", "record_video", "push_to_hub", "load_from_hub")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there are some."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def run_zoo(command: str, arguments: Sequence[str]) -> None:
    """
    Run a command of RL Zoo with QA2C registered, whether or not the start-up hook is there.

    :param command: Name of a module of RL Zoo, such as "train"
    :param arguments: Its arguments
    """
    # First, since registering looks in it for the run of Weights & Biases to go on with
    sys.argv = [f"rl_zoo3.{command}", *arguments]
    register()
    runpy.run_module(f"rl_zoo3.{command}", run_name="__main__", alter_sys=True)


def run_doctor(as_json: bool) -> int:
    """
    :param as_json: Whether to print JSON instead of a list for people
    :return: Exit code, 1 if something is wrong
    """
    findings = examine()
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"[{'ok' if finding.ok else '!!'}] {finding.what}: {finding.found}")
            if not finding.ok:
                print(f"     -> {finding.cure}")
    return 0 if all(finding.ok for finding in findings) else 1


def make_parser() -> argparse.ArgumentParser:
    """:return: The parser of the command line"""
    parser = argparse.ArgumentParser(prog="python -m sb3_qac", description="All-action actor-critics for Stable-Baselines3.")
    parser.add_argument("--version", action="version", version=f"sb3_qac {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    zoo = commands.add_parser(
        "zoo",
        help="run a command of RL Zoo that knows QA2C, also where the start-up hook is off",
        description="Runs `python -m rl_zoo3.COMMAND ARGUMENTS` with QA2C registered, also where the start-up hook is off.",
        epilog="Example: python -m sb3_qac zoo train --algo qa2c --env CartPole-v1 --progress",
    )
    zoo.add_argument("zoo_command", choices=ZOO_COMMANDS, metavar="COMMAND", help=", ".join(ZOO_COMMANDS))
    zoo.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="see `zoo COMMAND --help`")

    doctor = commands.add_parser("doctor", help="say whether the RL Zoo hook is live, and what is wrong if not")
    doctor.add_argument("--json", action="store_true", help="print JSON")

    benchmark = commands.add_parser(
        "benchmark",
        help="measure the speed of training beside stock A2C",
        formatter_class=HelpFormatter,
    )
    benchmark.add_argument("--env", default="PongNoFrameskip-v4", help="Atari environment")
    benchmark.add_argument("--n-envs", type=int, nargs="+", default=[16], help="numbers of environments")
    benchmark.add_argument("--seconds", type=float, default=20, help="seconds of one measurement")
    benchmark.add_argument("--repeats", type=int, default=5, help="rounds in which everything is measured once")
    benchmark.add_argument("--device", default="cpu", help="PyTorch device")
    benchmark.add_argument("--output", type=Path, default=Path("benchmark.json"), help="JSON file to write")

    add_study_parser(commands)

    report = commands.add_parser(
        "report",
        help="write up a study: curves, a table, statistics over seeds",
        description="Writes report.md, report.html and their images. Needs the extra: pip install 'sb3_qac[report]'",
        formatter_class=HelpFormatter,
    )
    report.add_argument("folder", type=Path, help="folder of the study")
    report.add_argument(
        "--goal", type=float, help="mean return of an evaluation that counts as solved; default: the study's --stop-return"
    )
    report.add_argument("--output", type=Path, help="folder for the report; default: that of the study")

    diagnose = commands.add_parser(
        "diagnose",
        help="measure estimators of the policy gradient, and the critic, on runs of a study",
        description="For runs of QA2C, at several points of the training: the gradient of each estimator on the same "
        "rollouts (variance, cosine to the all-action gradient, cost), and what the critic knows of the actions. "
        "Written to diagnosis.json in the folder of each run, for the report.",
        epilog="Example: python -m sb3_qac diagnose studies/pong/task1_seed-0 studies/pong/task1_seed-100",
        formatter_class=HelpFormatter,
    )
    diagnose.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="folder of a run, with its snapshots")
    diagnose.add_argument("--rollouts", type=int, default=200, help="rollouts at each point")
    diagnose.add_argument("--points", type=int, default=3, help="how many points, from the start to the end of the training")
    diagnose.add_argument("--threads", type=int, default=1, help="PyTorch threads")
    diagnose.add_argument("--json", action="store_true", help="print JSON instead of tables")

    video = commands.add_parser(
        "video",
        help="record the agent of a finished run, whole games with sampled and with greedy actions",
        formatter_class=HelpFormatter,
    )
    video.add_argument("folder", type=Path, metavar="RUN", help="folder of a run of a study")
    video.add_argument("--games", type=int, default=3, help="whole games in each video")
    video.add_argument("--fps", type=int, default=30, help="images a second; Atari games run at 15, every fourth image of 60")
    video.add_argument("--gif", action="store_true", help="write the beginning as a GIF as well")
    video.add_argument("--output", type=Path, help="folder for them; default: videos in that of the run")
    video.add_argument("--json", action="store_true", help="print the raw returns of the games as JSON")

    preset = commands.add_parser("presets", help="print the path of a hyperparameter file, for RL Zoo's --conf-file")
    preset.add_argument("algo", choices=(*ALGORITHMS, "a2c"), help="a2c: the stock A2C that QA2C is compared with")
    return parser


def add_study_parser(commands: Any) -> None:
    """:param commands: Where to add the command ``study``"""
    study = commands.add_parser(
        "study",
        help="train a grid of algorithms and seeds, to be compared",
        description="Trains each algorithm with each seed. Run it again after a kill or Ctrl-C: "
        "it goes on with what is unfinished, exactly, and repeats nothing.",
        epilog="Example: python -m sb3_qac study pong --jobs 2 --stop-return 18",
        formatter_class=HelpFormatter,
    )
    study.add_argument(
        "env", help=f"environment, or one of {', '.join(STUDIES)}: these may have other defaults than those below"
    )
    study.add_argument(
        "--algos",
        nargs="+",
        metavar="ALGO",
        help="task1, task2, beta1 (task 1 with beta=1), names of RL Zoo, or rungs of the ladder; default: a2c task1 task2",
    )
    study.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="seeds of each; default: 0 100")
    study.add_argument("--steps", type=int, help="environment steps of each; default: those of the preset")
    study.add_argument("--stop-return", type=float, help="mean return of an evaluation at which a training stops")
    study.add_argument("--eval-freq", type=int, help="environment steps between two evaluations; default: 300,000")
    study.add_argument("--eval-episodes", type=int, help="whole episodes of an evaluation, played at once; default: 30")
    study.add_argument(
        "--deterministic", action="store_true", help="evaluate the most probable action instead of sampled ones"
    )
    study.add_argument(
        "--stock", action="store_true", help="use SB3's Atari environments and network instead of the faster ones"
    )
    study.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="precision of the faster network")
    study.add_argument("--conf-file", help="YAML file with hyperparameters for all; default: each algorithm's own")
    study.add_argument("--jobs", type=int, default=1, help="trainings at once")
    study.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run them on this Ray cluster instead, auto for the one of this machine; needs the extra sb3_qac[ray], "
        "and the output folder on all of its machines",
    )
    study.add_argument("--threads", type=int, default=1, help="PyTorch threads of each training")
    study.add_argument("--device", default="auto", help="PyTorch device")
    study.add_argument(
        "--wandb",
        choices=("offline", "online", "disabled"),
        help="mode of Weights & Biases; default: offline, which needs no account",
    )
    study.add_argument("--output", type=Path, help="folder; default: studies/ENV")
    study.add_argument("--json", action="store_true", help="print the state of each run as JSON at the end")


def run_study_command(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code, 1 if a run failed
    """
    # RL Zoo is slow to import
    from sb3_qac.study.study import check_ray_address, run_study

    folder = args.output or Path("studies", args.env)
    if args.env == "ladder":
        check_ladder(args.algos)
    try:
        check_number("jobs", args.jobs, minimum=1)
        if args.ray is not None:
            check_ray_address(args.ray)
        runs = grid_of(args, folder)
    except ValueError as error:
        sys.exit(f"study: {error}")
    try:
        failed = run_study(runs, args.jobs, args.ray)
    except KeyboardInterrupt:
        sys.exit("study: interrupted; the same command goes on.")
    except ImportError as error:
        sys.exit(f"study: {error}. Install what --ray needs with: pip install 'sb3_qac[ray]'")
    except (ValueError, ConnectionError) as error:
        sys.exit(f"study: {error}")
    if args.json:
        print(json.dumps({run.folder: read_json(Path(run.folder, "status.json")) for run in runs}, indent=1))
    for run_folder, reason in failed.items():
        print(f"{run_folder} failed: {reason} (see error.txt in that folder)", file=sys.stderr)
    if args.env == "ladder":
        from sb3_qac.study.ladder import write_page

        print(write_page(folder, args.jobs), file=sys.stderr if args.json else sys.stdout)
    return 1 if failed else 0


def grid_of(args: argparse.Namespace, folder: Path) -> list[Any]:
    """
    :param args: Command line of ``study``
    :param folder: Folder of the study
    :return: its runs
    """
    from sb3_qac.study.study import make_grid

    given = {name: value for name, value in vars(args).items() if value is not None}
    asked = argparse.Namespace(**{**vars(study_of(args.env)), **given})
    return make_grid(
        asked.env,
        asked.algos,
        asked.seeds,
        folder,
        args.conf_file,
        n_timesteps=asked.steps,
        stop_return=args.stop_return,
        eval_freq=asked.eval_freq,
        n_eval_episodes=asked.eval_episodes,
        deterministic=asked.deterministic,
        native=not asked.stock,
        dtype=None if asked.stock else asked.dtype,
        n_threads=asked.threads,
        device=asked.device,
        wandb=asked.wandb,
    )


def check_ladder(algos: Sequence[str] | None) -> None:
    """
    End the program where there will be no page of the ladder, before half an hour of training instead of after it.

    :param algos: Algorithms that are asked for; None for all
    """
    if algos is not None and not set(algos) & set(RUNGS):
        sys.exit(f"study: the ladder has no rung {', '.join(algos)}. There are {', '.join(RUNGS)}.")
    missing = [name for name in ("markdown", "matplotlib", "rliable") if find_spec(name) is None]
    if missing:
        sys.exit(f"study: the ladder's page needs {', '.join(missing)}: pip install 'sb3_qac[report]'")


def run_report_command(folder: Path, goal: float | None, output: Path | None) -> None:
    """
    :param folder: Folder of the study
    :param goal: Mean return that counts as solved; None for that of the study
    :param output: Folder for the report
    """
    try:
        from sb3_qac.study.report import write_report

        print(write_report(folder, goal, output))
    except ValueError as error:
        sys.exit(f"report: {error}")
    except ImportError as error:
        sys.exit(f"report: {error}. Install what it needs with: pip install 'sb3_qac[report]'")


def run_diagnose_command(args: argparse.Namespace) -> None:
    """:param args: Command line"""
    # RL Zoo is slow to import
    from sb3_qac.study.diagnose import diagnose_run
    from sb3_qac.study.diagnose import tables as diagnosis_tables

    results = {}
    try:
        for folder in args.folders:
            results[folder.name] = diagnose_run(folder, args.rollouts, args.points, args.threads)
    except ValueError as error:
        sys.exit(f"diagnose: {error}")
    if args.json:
        print(json.dumps(results, indent=1))
        return
    for name, result in results.items():
        print("\n".join([f"## {name}", "", *diagnosis_tables(result), ""]))


def run_video_command(args: argparse.Namespace) -> None:
    """:param args: Command line"""
    # RL Zoo is slow to import
    from sb3_qac.study.video import record_videos, summary

    try:
        returns = record_videos(args.folder, args.games, args.output, args.fps, args.gif)
    except (ValueError, gym.error.Error) as error:
        # Classic control draws with pygame, which is an extra of gymnasium
        sys.exit(f"video: {error}")
    print(json.dumps(returns) if args.json else "\n".join(summary(returns)))


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: Command line, that of the process by default
    :return: Exit code
    """
    args = make_parser().parse_args(arguments)
    if args.command == "zoo":
        run_zoo(args.zoo_command, args.arguments)
    elif args.command == "study":
        return run_study_command(args)
    elif args.command == "report":
        run_report_command(args.folder, args.goal, args.output)
    elif args.command == "diagnose":
        run_diagnose_command(args)
    elif args.command == "video":
        run_video_command(args)
    elif args.command == "doctor":
        return run_doctor(args.json)
    elif args.command == "benchmark":
        try:
            report = run_benchmark(args.env, args.n_envs, args.seconds, args.repeats, args.device)
        except (ValueError, gym.error.Error) as error:
            sys.exit(f"benchmark: {error}")
        write_report(report, args.output)
        print("\n".join(tables(report)))
    else:
        print(presets(args.algo))
    return 0


if __name__ == "__main__":
    sys.exit(main())
