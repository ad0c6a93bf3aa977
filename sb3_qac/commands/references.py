"""``python -m sb3_qac references``: reference returns on FrozenLake-v1 and Blackjack-v1."""

import argparse
import json
import sys
from typing import Any

from sb3_qac.commands import HelpFormatter


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    references = commands.add_parser(
        "references",
        help="compute the best possible return and the return of tabular Q-learning on FrozenLake-v1 and Blackjack-v1",
        description="Prints JSON for both tasks: the value of the optimal policy by dynamic programming, and for each seed "
        "the mean return of the greedy policy of tabular Q-learning in 2,000 episodes.",
        formatter_class=HelpFormatter,
    )
    references.add_argument("--steps", type=int, default=500_000, help="environment steps of Q-learning")
    references.add_argument("--seeds", type=int, default=10, help="number of seeds")
    references.add_argument("--jobs", type=int, default=1, help="number of seeds to run at once")
    references.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code
    """
    from sb3_qac.study.references import references

    try:
        print(json.dumps(references(args.steps, args.seeds, args.jobs), indent=1))
    except ValueError as error:
        sys.exit(f"references: {error}")
    return 0
