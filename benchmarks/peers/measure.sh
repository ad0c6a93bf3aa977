#!/bin/bash
# Steps per second of training in Pong, without evaluations: bash benchmarks/peers/measure.sh ROUNDS > speed.csv
#
# PEERS: Python with SB3, RL Zoo, ale-py, opencv-python-headless and EnvPool 1.2.5. CLEANRL: Python with envpool==0.8.4, gym==0.23.1, numpy<2, torch, tyro
# and tensorboard. SOURCE: folder with CleanRL's ppo_atari_envpool.py and pqn_atari_envpool.py. OURS: Python with sb3_qac. Nothing else may run.
set -e
here=$(cd "$(dirname "$0")" && pwd)
logs=$(mktemp -d)
cd "$logs"

# SB3 prints a table, CleanRL "SPS: ...", sb3_envpool.py "... steps/s"; each is the average since the training's start
measure() {
    local name=$1
    shift
    "$@" >log 2>&1
    echo "$round,$name,default,$(grep -oE 'fps +\| +[0-9]+|SPS: [0-9]+|[0-9]+ steps/s' log | tail -1 | grep -oE '[0-9]+')"
}

ours() {
    local name=$1 threads=$2 algo=$3 steps=$4
    rm -rf study
    $OURS -m sb3_qac study pong --algos "$algo" --seeds 0 --steps "$steps" --eval-freq 100000000 --dtype bfloat16 --threads "$threads" \
        --wandb disabled --output study >log 2>&1
    echo "$round,$name,$threads,$(grep -ohE '"steps_per_second": [0-9]+' study/*/status.json | grep -oE '[0-9]+')"
}

echo "round,contender,threads,steps_per_second"
for round in $(seq "$1"); do
    zoo="$PEERS -m rl_zoo3.train --env PongNoFrameskip-v4 --eval-freq -1 --seed 0"
    measure "SB3 A2C with RL Zoo" $zoo --algo a2c -n 24000 --log-interval 100
    measure "SB3 PPO with RL Zoo" $zoo --algo ppo -n 12288 --log-interval 1
    measure "SB3 A2C on EnvPool" $PEERS "$here/sb3_envpool.py" a2c 32000
    measure "SB3 PPO on EnvPool" $PEERS "$here/sb3_envpool.py" ppo 12288
    measure "CleanRL PPO on EnvPool" $CLEANRL "$SOURCE/ppo_atari_envpool.py" --env-id Pong-v5 --total-timesteps 12288
    measure "CleanRL PQN on EnvPool" $CLEANRL "$SOURCE/pqn_atari_envpool.py" --env-id Pong-v5 --total-timesteps 12288
    ours "A2C on native environments" 1 a2c 40000
    ours "QA2C on native environments" 1 all-action 40000
    ours "A2C on native environments" 2 a2c 40000
    ours "QA2C on native environments" 2 all-action 40000
    ours "QPPO on native environments" 1 qppo 30720
    ours "QPPO on native environments" 2 qppo 30720
done
rm -rf "$logs"
