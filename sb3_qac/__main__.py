"""Command line: ``python -m sb3_qac``."""

import argparse
import sys
from collections.abc import Sequence

from sb3_qac import __version__
from sb3_qac.commands import (
    benchmark,
    diagnose,
    doctor,
    evaluate,
    export,
    pack,
    presets,
    references,
    report,
    search,
    study,
    video,
    zoo,
)

# The exit code that shells expect after Ctrl-C: 128 and the number of SIGINT
INTERRUPTED = 130


def make_parser() -> argparse.ArgumentParser:
    """:return: The parser of the command line"""
    parser = argparse.ArgumentParser(prog="python -m sb3_qac", description="All-action actor-critics for Stable-Baselines3.")
    parser.add_argument("--version", action="version", version=f"sb3_qac {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (
        zoo,
        doctor,
        benchmark,
        study,
        search,
        report,
        pack,
        diagnose,
        evaluate,
        export,
        video,
        references,
        presets,
    ):
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: Command line; by default, that of the process
    :return: Exit code
    """
    args = make_parser().parse_args(arguments)
    try:
        return args.run(args)
    except KeyboardInterrupt as interrupt:
        hint = f"; {interrupt}" if interrupt.args else ""
        print(f"{args.command}: interrupted{hint}.", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
