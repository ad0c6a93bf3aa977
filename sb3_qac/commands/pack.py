"""``python -m sb3_qac pack``: a study as a few small files."""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """:param commands: Subparsers to which the command is added"""
    pack = commands.add_parser(
        "pack",
        help="write the data of a study as a few small files, for a repository",
        description="Writes runs.csv (a row for each run), settings.json, evaluations.csv.xz (a row for each episode), "
        "curves.csv.xz (thinned), and diagnosis.json (if there are diagnoses). `report` reads them like the folders of the "
        "runs, and `pack PACKED --add --output OTHER` merges two packs. Studies in subfolders of the study are packed as "
        "parts: `report results/pong/PART --output FOLDER` reads one.",
        epilog="Example: python -m sb3_qac pack studies/pong --output results/pong",
    )
    pack.add_argument("folder", type=Path, metavar="STUDY", help="folder of the study")
    pack.add_argument("--output", type=Path, help="folder for the files; default: results/NAME_OF_THE_STUDY")
    pack.add_argument(
        "--add",
        action="store_true",
        help="keep the packed runs of OUTPUT that STUDY does not have, or has with fewer steps, as of another machine",
    )
    pack.add_argument(
        "--lost", nargs="+", default=[], metavar="RUN", help="runs that were lost with their machine, such as a2c_seed-0"
    )
    pack.add_argument("--points", type=int, default=100, help="points of a run's curves at most (default: 100)")
    pack.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    :param args: Command line
    :return: Exit code
    """
    from sb3_qac.common.checks import check_integer
    from sb3_qac.study.loading import load_everything
    from sb3_qac.study.pack import add_packed, check_all_are_there, check_environments, keep_lost, write_pack
    from sb3_qac.study.records import records_of

    try:
        check_integer("points", args.points, minimum=1)
        parts = load_everything(args.folder)
        output = args.output or Path("results", args.folder.resolve().name)
        check_environments(parts, output)
        if args.folder.resolve() != output.resolve():
            name_left_out(args.folder, parts)
        keep_lost(parts, output)
        kept = []
        if args.add:
            ours = {record.path: record for record in records_of(parts)}
            parts = add_packed(parts, output)
            for packed in records_of(parts):
                record = ours.get(packed.path)
                if record is not None and record.status is packed.status:
                    if packed.curves and not record.curves:
                        # They come from the pack, which may have more rows of them than `--points`
                        kept.append(packed.path)
                    continue
                kept.append(packed.path)
                if record is not None:
                    instead = f"its {packed.state} run in {output}, at {packed.status['steps']:,} steps, is kept"
                    steps = f"{record.status.get('steps', 0):,} steps"
                    print(f"pack: {record.path} is {record.state} in {args.folder}, at {steps}: {instead}.", file=sys.stderr)
        else:
            check_all_are_there(parts, output)
        for path in write_pack(parts, output, args.lost, args.points, kept):
            print(path)
    except ValueError as error:
        sys.exit(f"pack: {error}")
    return 0


def name_left_out(folder: Path, parts: dict[str, list[Any]]) -> None:
    """
    Name the runs that are only packed in a folder that has folders of other runs too.

    :param folder: Folder of a study
    :param parts: Records that are read from it, by part of the study
    """
    from sb3_qac.study.pack import packed_runs
    from sb3_qac.study.records import records_of

    loaded = {record.path for record in records_of(parts)}
    left_out = []
    # A damaged one, or a table of another program, is not a packed study
    with contextlib.suppress(ValueError):
        left_out = [path for path in packed_runs(folder)["run"] if path not in loaded]
    if left_out:
        reason = "left out, because there are folders of other runs. Pack those into it with `--add` first"
        print(f"pack: packed in {folder}, and {reason}: {', '.join(left_out)}.", file=sys.stderr)
