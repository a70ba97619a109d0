#!/usr/bin/env bash
# Submits a run to Slurm: one job for syncer and links on a CPU node, and one job for every island.
#   bash launch/slurm/submit.sh RUN.yaml RUN_DIR ISLAND...     RUN_DIR: on a file system that all nodes see
# Options of a cluster (account, partition, GPUs) come from the environment:
#   SYNCER_OPTIONS="--partition=cpu" ISLAND_OPTIONS="--partition=gpu --gpus-per-node=8" bash launch/slurm/submit.sh ...
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run_file=$(realpath "$1") run_dir=$(realpath -m "$2")
shift 2

export DILOCO_DS=$here/../../.venv/bin/diloco-ds RUN_FILE=$run_file RUN_DIR=$run_dir
# Word splitting of the options is wanted.
# shellcheck disable=SC2086
sbatch --export=ALL ${SYNCER_OPTIONS:-} "$here/syncer.sbatch"
for island in "$@"; do
    export ISLAND=$island
    # shellcheck disable=SC2086
    sbatch --export=ALL --job-name="diloco-$island" ${ISLAND_OPTIONS:-} "$here/island.sbatch"
done
