"""``python -m sb3_qac export``: the final agent of a run as a small file."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    export = commands.add_parser(
        "export",
        help="write the final agent of a run as a small file, for RL Zoo's enjoy and record_video",
        description="Writes OUTPUT/ALGO/ENV_1/ENV.zip, or with the next free number, without the state of the optimizer, "
        "and the files that RL Zoo needs. `enjoy` plays the one with the highest number.",
        epilog="Example: python -m sb3_qac export studies/pong/all-action_seed-0 agents, "
        "then python -m rl_zoo3.enjoy --algo qa2c --env PongNoFrameskip-v4 -f agents",
    )
    export.add_argument("folder", type=Path, metavar="RUN", help="folder of a finished run of a study")
    export.add_argument("output", type=Path, metavar="OUTPUT", help="folder of logs, as for RL Zoo's -f")
    export.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code
    """
    from sb3_qac.study.agents import export_agent

    try:
        print(export_agent(args.folder, args.output))
    except ValueError as error:
        sys.exit(f"export: {error}")
    return 0
