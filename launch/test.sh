#!/usr/bin/env bash
# Sets up and runs everything that checks this project: ruff, mypy and the whole test suite.
#   bash launch/test.sh [pytest arguments]      for example: bash launch/test.sh -m "not slow"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest "$@"
