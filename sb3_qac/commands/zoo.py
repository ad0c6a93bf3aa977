"""``python -m sb3_qac zoo``: RL Zoo's commands, with this package's algorithms registered."""

import argparse
import runpy
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

ZOO_COMMANDS = ("train", "enjoy", "record_video", "push_to_hub", "load_from_hub")
# Together these two end every `rl_zoo3.push_to_hub` in an ImportError
BROKEN_TOGETHER = {"rl_zoo3": "2.9.2", "sb3-team-hf-integration": "3.2"}


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    zoo = commands.add_parser(
        "zoo",
        help="run a command of RL Zoo with this package's algorithms registered, even if the start-up hook is off",
        description="Runs `python -m rl_zoo3.COMMAND ARGUMENTS` with this package's algorithms registered, "
        "even if the start-up hook is off.",
        epilog="Example: python -m sb3_qac zoo train --algo qa2c --env CartPole-v1 --progress",
    )
    zoo.add_argument("zoo_command", choices=ZOO_COMMANDS, metavar="COMMAND", help=", ".join(ZOO_COMMANDS))
    zoo.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="see `zoo COMMAND --help`")
    zoo.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code
    """
    from sb3_qac.zoo import register

    # Set first, because registering looks in it for the run of Weights & Biases to resume
    sys.argv = [f"rl_zoo3.{args.zoo_command}", *args.arguments]
    register()
    if args.zoo_command == "push_to_hub":
        repair_push_to_hub()
    runpy.run_module(f"rl_zoo3.{args.zoo_command}", run_name="__main__", alter_sys=True)
    return 0


def repair_push_to_hub() -> None:
    """
    RL Zoo asks for ``generate_metadata``, which its dependency sb3-team-hf-integration now calls ``_generate_metadata`` and no
    longer returns as a dict. Reported in https://github.com/huggingface/huggingface_sb3/issues/54
    """
    if any(version(package) != broken for package, broken in BROKEN_TOGETHER.items()):
        return
    # Not `from huggingface_sb3 import push_to_hub`, which is a function
    hub: Any = import_module("huggingface_sb3.push_to_hub")
    hub.generate_metadata = lambda *args: hub._generate_metadata(*args).to_dict()
