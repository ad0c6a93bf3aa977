"""
The commands of ``python -m sb3_qac``. Each module has ``add_parser``, and ``run``, which takes the arguments and returns the
exit code. What a command needs is imported when it runs, so that ``--help`` is fast.
"""

import argparse


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there are some."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help
