#!/usr/bin/env bash
# Run pytest with every Python that is installed of those below, or of PYTHONS: make test-matrix.
# Each gets an environment of its own with .[dev], gone again where all is well; arguments are pytest's.
set -euo pipefail
cd "$(dirname "$0")/.."
passed=()
for python in ${PYTHONS:-python3.10 python3.11 python3.12 python3.13 python3.14}; do
  if ! command -v "$python" >/dev/null; then
    echo "$python: not installed"
    continue
  fi
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  echo "$python: Python $version"
  venv=.venv-matrix-$version
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
  "$venv/bin/python" -m pytest "$@"
  rm -rf "$venv"
  passed+=("$version")
done
if [ ${#passed[@]} = 0 ]; then
  echo "none of them is installed; PYTHONS='python3.12 /opt/python3.13' names others" >&2
  exit 1
fi
echo "passed with Python ${passed[*]}"
