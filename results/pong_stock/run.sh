#!/usr/bin/env bash
# Task 1 of QA2C and stock A2C on Pong with SB3's own environments, side by side with one thread each. From the root of a
# checkout, with the package installed:
#   bash results/pong_stock/run.sh [FOLDER]
set -eu
folder=${1:-results/pong_stock/logs}
export OMP_NUM_THREADS=1
mkdir -p "$folder"
run() {
    name=$1; shift
    python -m rl_zoo3.train --env PongNoFrameskip-v4 --n-timesteps 2100000 --seed 0 --num-threads 1 "$@" \
        --eval-freq 300000 --eval-episodes 30 --n-eval-envs 30 --save-freq 300000 \
        --log-folder "$folder/$name" --tensorboard-log "$folder/$name/tensorboard" > "$folder/$name.log" 2>&1
}
run task1_seed-0 --algo qa2c &
run a2c_seed-0 --algo a2c --conf-file "$(python -m sb3_qac presets a2c)" &
wait
