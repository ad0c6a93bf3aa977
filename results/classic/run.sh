#!/usr/bin/env bash
# Every run of this folder, two at a time with one thread each. From the root of a checkout, with the package installed:
#   bash results/classic/run.sh [FOLDER]
set -eu
folder=${1:-results/classic/logs}
export OMP_NUM_THREADS=1
mkdir -p "$folder"
run() {
    name=$1; shift
    python -m rl_zoo3.train --algo qa2c -f "$folder/$name" --eval-freq 50000 --eval-episodes 100 --n-eval-envs 4 --num-threads 1 "$@" \
        > "$folder/$name.log" 2>&1
}
export -f run
export folder
for seed in 0 1 2; do
    echo "cartpole_seed-$seed --env CartPole-v1 --seed $seed"
    echo "cartpole_beta-0_seed-$seed --env CartPole-v1 --seed $seed -params beta:0.0"
    echo "acrobot_seed-$seed --env Acrobot-v1 --seed $seed"
    # The preset until commit 0411407
    echo "cartpole_lin-7e-4_seed-$seed --env CartPole-v1 --seed $seed -params learning_rate:'lin_7e-4'"
    echo "cartpole_lin-7e-4_beta-0_seed-$seed --env CartPole-v1 --seed $seed -params learning_rate:'lin_7e-4' beta:0.0"
    # Tried and not taken
    others="learning_rate:'lin_2e-3' ent_coef:0.01"
    echo "acrobot_lin-2e-3_seed-$seed --env Acrobot-v1 --seed $seed -params $others beta:1.0"
    echo "acrobot_lin-2e-3_beta-0_seed-$seed --env Acrobot-v1 --seed $seed -params $others beta:0.0"
done | xargs -P 2 -I{} bash -c 'run {}'
