"""
The commands of ``python -m sb3_qac``. Each module has ``add_parser``, and ``run``, which takes the arguments and returns the
exit code. Commands import what they need only when they run, so that ``--help`` is fast.
"""

import argparse


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def _threads(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, or 'auto', but {text!r} was given") from None


def add_training_options(command: argparse.ArgumentParser) -> None:
    """:param command: Parser of a command that trains, to which the options of all runs are added"""
    command.add_argument("--jobs", type=int, default=1, help="number of runs at once")
    command.add_argument(
        "--threads",
        type=_threads,
        default=1,
        metavar="N",
        help="PyTorch threads of each run; 'auto' for two if the machine is idle, and those of a run that is resumed",
    )
    command.add_argument("--device", default="auto", help="PyTorch device")
    command.add_argument(
        "--gym-packages",
        nargs="+",
        metavar="MODULE",
        default=[],
        help="modules to import, which register environments of your own",
    )
