"""``python -m sb3_qac diagnose``: estimators of the policy gradient, measured on runs of a study."""

import argparse
import sys
from pathlib import Path
from typing import Any

from sb3_qac.commands import HelpFormatter


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    diagnose = commands.add_parser(
        "diagnose",
        help="measure estimators of the policy gradient, and the critic, on runs of a study",
        description="For runs of QA2C, QPPO and PQN, at several points of the training: the gradient of each estimator on the "
        "same rollouts (variance, cosine to the all-action gradient, cost; not for PQN, which has no actor), and how well the "
        "critic distinguishes the actions. With --states, every action is also played on purpose. "
        "The result is written to diagnosis.json in the folder of each run, for the report.",
        epilog="Example: python -m sb3_qac diagnose studies/pong/all-action_seed-0 studies/pong/all-action_seed-100",
        formatter_class=HelpFormatter,
    )
    diagnose.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="folder of a run, with its snapshots")
    diagnose.add_argument("--rollouts", type=int, default=200, help="rollouts at each point")
    diagnose.add_argument(
        "--points",
        type=int,
        default=3,
        help="number of points, from the first to the last snapshot of the training; 1: the last",
    )
    diagnose.add_argument(
        "--states",
        type=int,
        default=0,
        help="number of visited states at each point from which every action is played, and the policy after it, to compare "
        "the returns with Q; default: 0, for none. It takes up to STATES x REPEATS x actions x 459 environment steps "
        "(at gamma 0.99)",
    )
    diagnose.add_argument("--repeats", type=int, default=4, help="how often each action is played from each of these states")
    diagnose.add_argument("--threads", type=int, default=1, help="PyTorch threads")
    diagnose.add_argument("--json", action="store_true", help="print JSON instead of tables")
    diagnose.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code
    """
    import gymnasium as gym

    from sb3_qac.common.files import to_json
    from sb3_qac.study.diagnosis import diagnose_run
    from sb3_qac.study.diagnosis_tables import diagnosis_tables

    results = {}
    try:
        for folder in args.folders:
            result = diagnose_run(folder, args.rollouts, args.points, args.threads, args.states, args.repeats)
            # Not its name, which runs on other environments have too
            results[str(folder)] = result
            if not args.json:
                print("\n".join([f"## {folder}", "", *diagnosis_tables(result), ""]), flush=True)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, ImportError, gym.error.Error) as error:
        sys.exit(f"diagnose: {error}")
    if args.json:
        print(to_json(results))
    return 0
