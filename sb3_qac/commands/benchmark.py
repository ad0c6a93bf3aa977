"""``python -m sb3_qac benchmark``: the speed of training, and the time to a return."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym

from sb3_qac.commands import HelpFormatter
from sb3_qac.study.catalogue import BENCHMARKED, VARIANTS


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    benchmark = commands.add_parser(
        "benchmark",
        help="measure the speed of training, or the time until a return is reached",
        description="Measures environment steps per second, and the parts of a rollout and its update. With --until-return it "
        "measures steps and seconds until an evaluation reaches that return. The settings are those that `study` gives.",
        epilog="Example: python -m sb3_qac benchmark --env CartPole-v1 --until-return 475 --steps 200000 --seeds 0 1 2",
        formatter_class=HelpFormatter,
    )
    benchmark.add_argument(
        "--env", default="PongNoFrameskip-v4", help="environment: an Atari game, or a task with vectors such as CartPole-v1"
    )
    benchmark.add_argument(
        "--algos",
        nargs="+",
        default=list(BENCHMARKED),
        metavar="ALGO",
        help="algorithms, as for `study`; the first is the baseline",
    )
    benchmark.add_argument(
        "--variants",
        nargs="+",
        choices=list(VARIANTS),
        help="for Atari: SB3's environments, with its network where the preset names no other, or the native environments and "
        "the faster network in this precision; default: all",
    )
    benchmark.add_argument(
        "--n-envs",
        type=int,
        nargs="+",
        help="numbers of environments; default: 16, and with --until-return that of the preset",
    )
    benchmark.add_argument("--seconds", type=float, help="duration of one measurement in seconds (default: 20)")
    benchmark.add_argument("--repeats", type=int, help="rounds in which everything is measured once (default: 5)")
    benchmark.add_argument("--device", default="cpu", help="PyTorch device")
    benchmark.add_argument("--output", type=Path, default=Path("benchmark.json"), help="JSON file to write")
    benchmark.add_argument("--json", action="store_true", help="print JSON instead of tables")
    until = benchmark.add_argument_group("until a return")
    until.add_argument(
        "--until-return",
        type=float,
        metavar="RETURN",
        help="train until an evaluation reaches this mean return; the trainings are kept in a folder next to the output "
        "(benchmark.runs), and the same command resumes them",
    )
    until.add_argument(
        "--steps", type=int, help="environment steps after which a training ends in any case (default: 1,000,000)"
    )
    until.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="seeds of each algorithm (default: 0)")
    until.add_argument("--eval-freq", type=int, help="environment steps between two evaluations; default: a 20th of --steps")
    until.add_argument("--eval-episodes", type=int, help="whole episodes in an evaluation, played in parallel (default: 30)")
    benchmark.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code
    """
    from sb3_qac.common.threads import limit_spinning

    # Before PyTorch is imported
    limit_spinning()
    from sb3_qac.common.files import to_json
    from sb3_qac.study import benchmark, until_return

    module = benchmark if args.until_return is None else until_return
    try:
        report = measure(args)
    except (ValueError, gym.error.Error) as error:
        sys.exit(f"benchmark: {error}")
    except KeyboardInterrupt:
        if args.until_return is not None:
            raise KeyboardInterrupt("the same command continues with the trainings that are not finished") from None
        raise
    # The output of an earlier call may be complete
    output = args.output.with_stem(f"{args.output.stem}-interrupted") if report.get("interrupted") else args.output
    failure = None
    try:
        benchmark.write_report(report, output)
    except OSError as error:
        # The measurements took long: they are printed all the same
        failure = f"benchmark: {output} could not be written ({error.strerror})."
    print(to_json(report) if args.json else "\n".join(module.tables(report)))
    if failure is not None:
        sys.exit(failure)
    if report.get("interrupted"):
        kept = f"{output} has the complete rounds"
        if report["interrupted"] == benchmark.INTERRUPTED:
            raise KeyboardInterrupt(kept)
        sys.exit(f"benchmark: {report['interrupted']} {kept}.")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """
    :param args: Command line
    :return: the report
    :raises ValueError: for a value that is not allowed, or if a training failed
    """
    from sb3_qac.common.allocator import keep_freed_memory
    from sb3_qac.common.checks import check_number
    from sb3_qac.common.files import check_writable, make_folder
    from sb3_qac.study.benchmark import contenders_of, run_benchmark
    from sb3_qac.study.until_return import run_until_return

    if args.output.is_dir() or args.output.suffix == ".runs":
        raise ValueError(f"`output` must be a JSON file, but {args.output} is a folder or the name of one. Name a file.")
    make_folder(args.output.absolute().parent)
    check_writable(args.output)
    contenders = contenders_of(args.env, args.algos, args.variants)
    if args.until_return is None:
        for option in ("steps", "seeds", "eval_freq", "eval_episodes"):
            if getattr(args, option) is not None:
                raise ValueError(f"--{option.replace('_', '-')} is for the time to a return: give `--until-return` too.")
        return run_benchmark(
            args.env,
            contenders,
            args.n_envs or [16],
            20.0 if args.seconds is None else args.seconds,
            5 if args.repeats is None else args.repeats,
            args.device,
        )
    for option in ("seconds", "repeats"):
        if getattr(args, option) is not None:
            raise ValueError(f"--{option} is for the speed of training: leave `--until-return` out, or this option.")
    if args.n_envs is not None and len(args.n_envs) > 1:
        raise ValueError(f"`n-envs` must be one number with --until-return, but {args.n_envs} was given.")
    # By the names of the options; the settings of a run have others
    check_number("until_return", args.until_return, minimum=-math.inf)
    for name in ("steps", "eval_freq", "eval_episodes"):
        if (value := getattr(args, name)) is not None:
            check_number(name, value, minimum=1)
    keep_freed_memory()
    asked = {"seeds": args.seeds, "n_timesteps": args.steps, "n_eval_episodes": args.eval_episodes}
    return run_until_return(
        args.env,
        contenders,
        args.until_return,
        args.output.with_suffix(".runs"),
        eval_freq=args.eval_freq,
        n_envs=None if args.n_envs is None else args.n_envs[0],
        device=args.device,
        **{name: value for name, value in asked.items() if value is not None},
    )
