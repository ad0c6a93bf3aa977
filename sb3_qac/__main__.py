"""Command line: ``python -m sb3_qac``."""

import argparse
import errno
import os
import select
import sys
from collections.abc import Sequence

from sb3_qac import __version__
from sb3_qac.commands import (
    diagnose,
    doctor,
    evaluate,
    export,
    presets,
    report,
    study,
    video,
    zoo,
)

# The exit codes that shells expect after Ctrl-C and from a broken pipe: 128 and the number of SIGINT or SIGPIPE
INTERRUPTED, BROKEN_PIPE = 130, 141


def make_parser() -> argparse.ArgumentParser:
    """:return: The parser of the command line"""
    parser = argparse.ArgumentParser(prog="python -m sb3_qac", description="All-action actor-critics for Stable-Baselines3.")
    parser.add_argument("--version", action="version", version=f"sb3_qac {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (
        zoo,
        doctor,
        study,
        report,
        diagnose,
        evaluate,
        export,
        video,
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
        code = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt as interrupt:
        hint = f"; {interrupt}" if interrupt.args else ""
        print(f"{args.command}: interrupted{hint}.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _output_is_broken():
            raise
        # The program that reads it has ended, such as `head`. Python would write the rest at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"{args.command}: the disk is full{where}. Free some space, and give the command again.", file=sys.stderr)
        return 1


def _output_is_broken() -> bool:
    """:return: whether nobody reads the standard output any more. Other pipes lead to processes, which may die too."""
    try:
        output = select.poll()
        output.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0))
    except (AttributeError, OSError):
        # There is no output, or only a replacement in memory. Windows has no such function
        return False


if __name__ == "__main__":
    sys.exit(main())
