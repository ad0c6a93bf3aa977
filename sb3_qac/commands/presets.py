"""``python -m sb3_qac presets``: where the hyperparameters are."""

import argparse
from typing import Any

# `sb3_qac.zoo.ALGORITHMS`, whose import takes PyTorch, and SB3's A2C
PRESETS = ("qa2c", "qppo", "reinforce", "a2c")


def add_parser(commands: Any) -> None:
    """:param commands: Where to add the command"""
    preset = commands.add_parser("presets", help="print the path of a hyperparameter file, for RL Zoo's --conf-file")
    preset.add_argument("algo", choices=PRESETS, help="a2c: SB3's A2C with the settings that QA2C is compared with")
    preset.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code
    """
    from sb3_qac.zoo import presets

    print(presets(args.algo))
    return 0
