#!/usr/bin/env bash
# Sets up and runs everything that checks this project: ruff, mypy and the whole test suite.
#   bash launch/test.sh [pytest arguments]      for example: bash launch/test.sh -m "not slow"; one after the other: -n 0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# Files of tests side by side: those of whole runs wait for processes for much of their time.
cores=$(nproc)
exec .venv/bin/python -m pytest -n "$((cores < 8 ? cores : 8))" --dist loadfile --no-loadscope-reorder "$@"
