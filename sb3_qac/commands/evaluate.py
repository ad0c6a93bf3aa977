"""``python -m sb3_qac evaluate``: play new episodes with the final agents of runs."""

import argparse
import sys
from pathlib import Path
from typing import Any

from sb3_qac.commands import HelpFormatter


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    evaluate = commands.add_parser(
        "evaluate",
        help="play new episodes with the final agents of runs, with sampled and with greedy actions",
        description="Plays whole episodes that were not used in training. For each agent it prints the mean raw return, its "
        "standard deviation over episodes, and the number of episodes.",
        epilog="Example: python -m sb3_qac evaluate studies/cartpole/*_seed-0 --episodes 100",
        formatter_class=HelpFormatter,
    )
    evaluate.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="folder of a finished run of a study")
    evaluate.add_argument(
        "--episodes",
        type=int,
        default=1000,
        help="number of whole episodes for each kind of action; 30 are enough for Atari games",
    )
    evaluate.add_argument("--threads", type=int, default=1, help="PyTorch threads")
    evaluate.add_argument("--json", action="store_true", help="print a line of JSON for each agent")
    evaluate.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code
    """
    import gymnasium as gym
    import torch as th

    from sb3_qac.common.checks import check_number
    from sb3_qac.common.files import to_json
    from sb3_qac.study.agents import evaluate_agent, evaluation_line

    try:
        check_number("threads", args.threads, minimum=1)
    except ValueError as error:
        sys.exit(f"evaluate: {error}")
    th.set_num_threads(args.threads)
    errors = []
    for folder in args.folders:
        try:
            result = evaluate_agent(folder, args.episodes)
        except (OSError, ValueError, ImportError, gym.error.Error) as error:
            # The remaining agents are still evaluated
            errors.append(f"evaluate: {error}")
        else:
            print(to_json(result, indent=None) if args.json else evaluation_line(result), flush=True)
    if errors:
        # A wrong number of episodes is the same error for each agent
        sys.exit("\n".join(dict.fromkeys(errors)))
    return 0
