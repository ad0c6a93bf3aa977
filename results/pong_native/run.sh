#!/usr/bin/env bash
# Task 1 of QA2C on Pong with the native environments and the lean network, in float32 and in bfloat16, side by side with one
# thread each. Run again, it goes on with what is unfinished. From the root of a checkout, with the package installed:
#   bash results/pong_native/run.sh [FOLDER]
set -eu
folder=${1:-results/pong_native/logs}
export OMP_NUM_THREADS=1
mkdir -p "$folder"
run() {
    name=$1; dtype=$2
    python -m rl_zoo3.train --algo qa2c --env PongNoFrameskip-v4 --n-timesteps 6000000 --seed 0 --num-threads 1 \
        --eval-freq 300000 --eval-episodes 30 --n-eval-envs 30 \
        --log-folder "$folder/$name" --tensorboard-log "$folder/$name/tensorboard" \
        --hyperparams "vec_env_wrapper:'sb3_qac.common.env_util.to_ale_vec_env'" \
        "callback:'sb3_qac.common.callbacks.ExactCheckpointCallback'" \
        "policy_kwargs:'dict(features_extractor_class=LeanNatureCNN,features_extractor_kwargs=dict(dtype=\"$dtype\"))'" \
        >> "$folder/$name.log" 2>&1
}
run task1_float32_seed-0 float32 &
run task1_bfloat16_seed-0 bfloat16 &
wait
