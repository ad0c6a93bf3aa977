"""``python -m sb3_qac doctor``: check the installation, and how to fix it."""

import argparse
import json
from typing import Any


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    doctor = commands.add_parser(
        "doctor",
        help="check the installation and how to fix it: versions, Atari games and the hook into RL Zoo",
        description="Checks versions, Atari games and the hook into RL Zoo, and says how to fix what is wrong. "
        "The exit code is 1 if anything is wrong.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code, 1 if something is wrong
    """
    from sb3_qac.doctor import examine

    findings = examine()
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"[{'ok' if finding.ok else '!!'}] {finding.what}: {finding.found}")
            if not finding.ok:
                print(f"     -> {finding.fix}")
    return 0 if all(finding.ok for finding in findings) else 1
