#!/usr/bin/env bash
# Copies what the repository keeps of a study: settings, states, every evaluation episode, curves, diagnoses, reports; no models,
# checkpoints, monitor and TensorBoard files, and the large plots as PNG only.
#
#     results/keep.sh STUDY TARGET
set -eu
mkdir -p "$2"
find "$1" -type f \( -name run.json -o -name status.json -o -name evaluations.npz -o -name curves.csv -o -name diagnosis.json \
    -o -name error.txt -o -name config.yml -o -name 'report.*' -o -name 'ladder.*' -o -name '*.png' -o -name '*.svg' \) \
    -not -name 'curves-*.svg' -not -path '*/checkpoints/*' -not -path '*/wandb/*' -printf '%P\n' | tar -C "$1" -cf - -T - | tar -C "$2" -xf -
