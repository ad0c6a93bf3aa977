"""
Keep the final agent of a study's run where RL Zoo's `enjoy` and `record_video` find it, as small as it can be: without the
state of its optimizer, and with the layers that a network in bfloat16 rounds before it uses them rounded already. It plays the
same.

    python results/keep_agent.py RUN TARGET
"""

import argparse
import shutil
from pathlib import Path

import torch as th
from rl_zoo3.utils import ALGOS

from sb3_qac.common.torch_layers import LeanNatureCNN
from sb3_qac.study.diagnose import settings_of
from sb3_qac.study.runs import save_for_playing
from sb3_qac.zoo import register


def keep_agent(folder: Path, target: Path) -> Path:
    """:param folder: of a finished run; :param target: RL Zoo's folder of logs; :return: the agent that is kept"""
    register()
    run = settings_of(folder)
    name = run.env_id.replace("/", "-")
    model = ALGOS[run.algo].load(folder / f"{name}.zip", device="cpu")
    model.tensorboard_log = None
    extractor = model.policy.features_extractor
    if isinstance(extractor, LeanNatureCNN) and extractor.dtype == th.bfloat16:
        # The first layer is divided by 255 before it is rounded
        for parameter in [*extractor.cnn[2:].parameters(), *extractor.linear.parameters()]:
            parameter.data = parameter.data.to(th.bfloat16)
    kept = target / run.algo / f"{name}_1" / f"{name}.zip"
    shutil.copytree(
        folder / name, kept.with_suffix(""), dirs_exist_ok=True, ignore=shutil.ignore_patterns("args.yml", "command.txt")
    )
    save_for_playing(model, kept)
    return kept


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("target", type=Path, help="folder of logs, as for RL Zoo's -f")
    args = parser.parse_args()
    print(keep_agent(args.run, args.target))
