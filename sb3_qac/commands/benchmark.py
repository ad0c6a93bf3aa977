"""``python -m sb3_qac benchmark``: the speed of training."""

import argparse
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym

from sb3_qac.commands import HelpFormatter


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    benchmark = commands.add_parser(
        "benchmark",
        help="measure the speed of training and compare it with A2C on SB3's environments",
        formatter_class=HelpFormatter,
    )
    benchmark.add_argument(
        "--env", default="PongNoFrameskip-v4", help="environment: an Atari game, or a task with vectors such as CartPole-v1"
    )
    benchmark.add_argument("--n-envs", type=int, nargs="+", default=[16], help="numbers of environments")
    benchmark.add_argument("--seconds", type=float, default=20, help="duration of one measurement in seconds")
    benchmark.add_argument("--repeats", type=int, default=5, help="rounds in which everything is measured once")
    benchmark.add_argument("--device", default="cpu", help="PyTorch device")
    benchmark.add_argument("--output", type=Path, default=Path("benchmark.json"), help="JSON file to write")
    benchmark.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code
    """
    from sb3_qac.study.benchmark import run_benchmark, tables, write_report

    try:
        report = run_benchmark(args.env, args.n_envs, args.seconds, args.repeats, args.device)
    except (ValueError, gym.error.Error) as error:
        sys.exit(f"benchmark: {error}")
    write_report(report, args.output)
    print("\n".join(tables(report)))
    return 0
