"""
Draw what was logged of several runs over each other: return, entropy, explained variance and value loss of the critic.

    python results/overlay.py IMAGE RUN...

A run is a folder with the ``curves.csv`` that collect.py writes. Thin lines are what was logged, thick ones means of 20 rows.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

PANELS = {
    "rollout/ep_rew_mean": "return of the last 100 training episodes",
    "train/entropy_loss": "entropy of the policy [nats]",
    "train/explained_variance": "explained variance of V~",
    "train/value_loss": "value loss",
}


def main() -> None:
    """Draw the runs given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path, metavar="IMAGE", help="PNG or SVG to write")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    args = parser.parse_args()
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    for i, run in enumerate(args.runs):
        curves = pd.read_csv(run / "curves.csv").set_index("step")
        label = f"{run.parent.name}/{run.name}"
        for panel, (tag, title) in zip(axes.flat, PANELS.items(), strict=True):
            values = curves[tag].dropna() * (-1 if tag == "train/entropy_loss" else 1)
            panel.plot(values.index / 1e6, values, color=f"C{i}", alpha=0.2, linewidth=0.6)
            panel.plot(values.index / 1e6, values.rolling(20, min_periods=1).mean(), color=f"C{i}", label=label)
            panel.set_title(title)
            panel.grid(alpha=0.3)
    axes[0, 0].legend(fontsize="small")
    axes.flat[2].set_ylim(-0.2, 1.02)
    axes.flat[3].set_yscale("log")
    for panel in axes[1]:
        panel.set_xlabel("environment steps [millions]")
    figure.savefig(args.image, dpi=110)


if __name__ == "__main__":
    main()
