#!/usr/bin/env bash
# Four islands in a seeded storm of faults on two cores, beside the same run without: what it costs. About 45 minutes; 3 with
# --short: half a minute in which a fault comes every five seconds, and no run without.
#   bash launch/storm.sh [--short] [--seed N] [--json] [key=value ...]      also --minutes M, --rate N, --without-calm (diloco-ds drill storm)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arguments=()
for argument in "$@"; do
    case $argument in
        --short) arguments+=(--minutes 0.5 --rate 720 --without-calm) ;;
        *) arguments+=("$argument") ;;
    esac
done

bash launch/setup.sh >&2
exec .venv/bin/diloco-ds drill storm launch/storm.yaml "${arguments[@]}"
