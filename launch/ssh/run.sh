#!/usr/bin/env bash
# A run over hosts that are reached by ssh: syncer and links here, in this terminal, each island on a host of its own.
#   bash launch/ssh/run.sh RUN.yaml RUN_DIR ISLAND=HOST...      for example: ... my_run.yaml /shared/runs/mine a=gpu1 b=gpu2
# RUN_DIR and this checkout lie on a file system that all hosts see. Ctrl-C stops the run, islands included, with checkpoints.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
program=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/.venv/bin/diloco-ds
run_file=$(realpath "$1") run_dir=$(realpath -m "$2")
shift 2

start_island() { # ISLAND HOST: as soon as the run directory is there
    until [ -f "$run_dir/manifest.json" ]; do
        sleep 1
        kill -0 $$ || return
    done
    ${SSH:-ssh} "$2" "mkdir -p '$run_dir/logs'; setsid nohup '$program' island '$run_dir' '$1' --host '$2' >'$run_dir/logs/island.$1.log' 2>&1 </dev/null &"
}

for pair in "$@"; do
    [[ $pair == *=* ]] || { echo "run.sh: '$pair' is not ISLAND=HOST" >&2; exit 2; }
    start_island "${pair%%=*}" "${pair#*=}" &
done
if [ -f "$run_dir/manifest.json" ]; then
    exec "$program" train --no-islands --resume "$run_dir"
fi
exec "$program" train --no-islands "$run_file" --run-dir "$run_dir"
