"""
The commands of ``python -m sb3_qac``. Each module has ``add_parser``, and ``run``, which takes the arguments and returns the
exit code. Commands import what they need only when they run, so that ``--help`` is fast.
"""

import argparse


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help
