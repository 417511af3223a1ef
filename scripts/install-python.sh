#!/usr/bin/env bash
# Makes the virtual environment build/venv with the Python packages of tests/requirements.txt and requirements-nvidia.txt,
# and build/networks with those of requirements-networks.txt, from PyPI. Tests that compare us with PyTorch and others run in it; without it
# they report SKIPPED. Does nothing when it is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=build/venv
stamp=$venv/requirements.txt
wanted=(tests/requirements.txt tests/requirements-nvidia.txt tests/requirements-networks.txt)
if cat "${wanted[@]}" | cmp -s - "$stamp"; then
  exit 0
fi
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check -r tests/requirements.txt
if [[ $(uname -m) == x86_64 ]]; then
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r tests/requirements-nvidia.txt
fi
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --upgrade --target build/networks -r tests/requirements-networks.txt
cat "${wanted[@]}" >"$stamp"
