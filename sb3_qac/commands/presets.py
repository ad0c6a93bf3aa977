"""``python -m sb3_qac presets``: the path of a hyperparameter file."""

import argparse
from typing import Any

# `sb3_qac.zoo.ALGORITHMS`, without importing it and PyTorch, and what they are compared with
PRESETS = ("qa2c", "qppo", "reinforce", "pqn", "a2c", "ppo")


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    preset = commands.add_parser(
        "presets",
        help="print the path of a hyperparameter file, for RL Zoo's --conf-file",
        description="Prints the path of the file with the hyperparameters of an algorithm, for RL Zoo's --conf-file.",
    )
    preset.add_argument(
        "algo",
        nargs="?",
        choices=PRESETS,
        help="default: all; those of a2c and ppo are for comparisons",
    )
    preset.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code
    """
    from sb3_qac.zoo import presets

    for algo in (args.algo,) if args.algo else PRESETS:
        print(presets(algo))
    return 0
