#!/usr/bin/env bash
# RL Zoo's own search for the settings of one environment's preset; run again, it goes on with the same study. Two at once share it.
#
#     bash results/tuning/search.sh ENV STEPS TRIALS [FOLDER]
set -eu
env=$1 steps=$2 trials=$3 folder=${4:-results/tuning/logs}
export OMP_NUM_THREADS=1
mkdir -p "$folder"
python -m rl_zoo3.train --algo qa2c --env "$env" -n "$steps" -optimize --max-total-trials "$trials" --n-startup-trials 12 --n-evaluations 4 \
    --eval-episodes 20 --n-eval-envs 10 --sampler tpe --pruner median --num-threads 1 --no-optim-plots -f "$folder" \
    --study-name "$env" --storage "$folder/$env.log"
