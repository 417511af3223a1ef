#!/usr/bin/env bash
# Makes the virtual environment build/venv with the Python packages of tests/requirements.txt, from PyPI. Tests that
# compare us with PyTorch and others run in it; without it they report SKIPPED. Does nothing when it is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=build/venv
stamp=$venv/requirements.txt
if cmp -s tests/requirements.txt "$stamp"; then
  exit 0
fi
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check -r tests/requirements.txt
cp tests/requirements.txt "$stamp"
