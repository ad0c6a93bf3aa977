"""``python -m sb3_qac report``: write the report of a study."""

import argparse
import sys
from pathlib import Path
from typing import Any

from sb3_qac.commands import HelpFormatter


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    report = commands.add_parser(
        "report",
        help="write the report of a study: curves, a table, statistics over seeds",
        description="Writes report.md, report.html and their images. Needs the extra `report`: pip install '.[report]'",
        formatter_class=HelpFormatter,
    )
    report.add_argument("folder", type=Path, help="folder of the study")
    report.add_argument(
        "--goal", type=float, help="mean return of an evaluation that counts as solved; default: the study's --stop-return"
    )
    report.add_argument(
        "--reference",
        metavar="GROUP",
        help="also divide returns by the mean return of this group, and draw their interquartile mean over the environments "
        "against steps and against time",
    )
    report.add_argument("--output", type=Path, help="folder for the report; default: the folder of the study")
    report.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code
    """
    try:
        from sb3_qac.study.report import write_report

        print(write_report(args.folder, args.goal, args.output, args.reference))
    except ValueError as error:
        sys.exit(f"report: {error}")
    except ImportError as error:
        sys.exit(f"report: {error}. Install what it needs with: pip install '.[report]', in the checkout")
    return 0
