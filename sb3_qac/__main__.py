"""Command line: ``python -m sb3_qac``."""

import argparse
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import gymnasium as gym

from sb3_qac import __version__
from sb3_qac.doctor import examine
from sb3_qac.study.benchmark import run_benchmark, tables, write_report
from sb3_qac.zoo import presets, register

ZOO_COMMANDS = ("train", "enjoy", "record_video", "push_to_hub", "load_from_hub")


def run_zoo(command: str, arguments: Sequence[str]) -> None:
    """
    Run a command of RL Zoo with QA2C registered, whether or not the start-up hook is there.

    :param command: Name of a module of RL Zoo, such as "train"
    :param arguments: Its arguments
    """
    register()
    sys.argv = [f"rl_zoo3.{command}", *arguments]
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
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    benchmark.add_argument("--env", default="PongNoFrameskip-v4", help="Atari environment")
    benchmark.add_argument("--n-envs", type=int, nargs="+", default=[16], help="numbers of environments")
    benchmark.add_argument("--seconds", type=float, default=20, help="seconds of one measurement")
    benchmark.add_argument("--repeats", type=int, default=5, help="rounds in which everything is measured once")
    benchmark.add_argument("--device", default="cpu", help="PyTorch device")
    benchmark.add_argument("--output", type=Path, default=Path("benchmark.json"), help="JSON file to write")

    preset = commands.add_parser("presets", help="print the path of a hyperparameter file, for RL Zoo's --conf-file")
    preset.add_argument("algo", choices=("qa2c", "a2c"), help="a2c: the stock A2C that QA2C is compared with")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: Command line, that of the process by default
    :return: Exit code
    """
    args = make_parser().parse_args(arguments)
    if args.command == "zoo":
        run_zoo(args.zoo_command, args.arguments)
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
