#!/usr/bin/env bash
# Sets everything up and trains launch/quickstart.yaml: the main job, about eight minutes on two CPU cores.
#   bash launch/quickstart.sh [key=value ...]      for example: bash launch/quickstart.sh budget.tokens=300000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
exec .venv/bin/diloco-ds train launch/quickstart.yaml "$@"
