"""``python -m sb3_qac video``: record the agent of a run."""

import argparse
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym

from sb3_qac.commands import HelpFormatter


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    video = commands.add_parser(
        "video",
        help="record whole games of the agent of a finished run, with sampled and with greedy actions",
        description="Writes sampled.mp4 and greedy.mp4: whole games with sampled actions and with the most probable ones.",
        formatter_class=HelpFormatter,
    )
    video.add_argument("folder", type=Path, metavar="RUN", help="folder of a run of a study")
    video.add_argument("--games", type=int, default=3, help="number of whole games in each video")
    video.add_argument("--fps", type=int, default=30, help="images per second; Atari games run at 15 (every fourth of 60)")
    video.add_argument("--output", type=Path, help="folder for the videos; default: videos in the folder of the run")
    video.add_argument("--json", action="store_true", help="print the raw returns of the games as JSON")
    video.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code
    """
    from sb3_qac.common.files import to_json
    from sb3_qac.study.video import record_videos, summary

    output = args.output or args.folder / "videos"
    try:
        returns = record_videos(args.folder, output, args.games, args.fps)
    except (OSError, ValueError, ImportError, gym.error.Error) as error:
        # Classic control draws with pygame, which is an extra of gymnasium. A wrapper of the run may not be found here
        sys.exit(f"video: {error}")
    print(to_json(returns, indent=None) if args.json else "\n".join([*summary(returns), f"The videos are in {output}."]))
    return 0
