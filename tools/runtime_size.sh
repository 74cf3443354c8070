#!/usr/bin/env bash
# Installs paceline[cpu] alone into a fresh environment and prints how large that is, in MB (10^6 bytes), pip itself
# left out: the packages as they are installed, and with the bytecode that Python caches beside them.
# Fails when the packages take 200 MB or more, or when `import paceline` does not work there.
set -euo pipefail
cd "$(dirname "$0")/.."
limit_mb=200
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile --disable-pip-version-check -c constraints.txt '.[cpu]'
cd "$work"
venv/bin/pip uninstall --quiet --yes setuptools 2>/dev/null || true
venv/bin/pip uninstall --quiet --yes pip
site=$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
find "$site" -name __pycache__ -type d -prune -exec rm -rf {} +

megabytes() { echo $(($(du --apparent-size --bytes --summarize "$site" | cut -f1) / 1000000)); }

du --apparent-size --block-size=1000000 --summarize "$site"/* | sort -n | tail -8
packages_mb=$(megabytes)
venv/bin/python -m compileall -q "$site" >/dev/null || true
echo "paceline[cpu] and all it needs: $packages_mb MB (limit $limit_mb), $(megabytes) MB with bytecode caches"
venv/bin/python -c 'import paceline, onnxruntime'
[ "$packages_mb" -lt "$limit_mb" ]
