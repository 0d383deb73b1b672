#!/usr/bin/env bash
# CONFIG_FILE=train_configs/x.toml NGPU=8 ./run_train.sh [--section.key value ...]
# Several hosts: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT on each (or WORLD_SIZE, RANK, as schedulers set them).
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
config=${CONFIG_FILE:-train_configs/debug.toml}
if [[ ! -e $config && -e $repository/$config ]]; then config=$repository/$config; fi
nnodes=${NNODES:-${RANK:+${WORLD_SIZE:-}}}
node_rank=${NODE_RANK:-${RANK:-0}}
unset RANK LOCAL_RANK WORLD_SIZE # of hosts here, of processes in torch

export LOG_RANK=${LOG_RANK:-0}
export PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 # this clone, not what the caller's folder holds
exec python3 -m titan_loom.launch \
    ${NGPU:+--nproc_per_node "$NGPU"} --local_ranks_filter "$LOG_RANK" \
    --nnodes "${nnodes:-1}" --node_rank "$node_rank" \
    --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "${MASTER_PORT:-29500}" \
    -m titan_loom.train --job.config_file "$config" "$@"
