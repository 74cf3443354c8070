#!/usr/bin/env bash
# Everything that a GPU has to prove, on a fresh machine with an NVIDIA GPU. Not yet run on one; it is meant to take less
# than ten minutes there (--cpu took 19 on two cores that did other things, too):
#
#   tools/gpu_acceptance.sh            installs into a fresh environment, exports, builds, runs; writes models/results/gpu-*
#   tools/gpu_acceptance.sh --cpu      the part that needs no GPU: the same bundles and programs with the CPU provider
#
# Variables: PYTHON, the interpreter; WORK, where bundles and results go (a temporary folder; results are copied to
# models/results only with a GPU); PACELINE, an interpreter that has paceline with its extras, instead of an installation;
# BACKEND, tensorrt-rtx or tensorrt; SOURCE, what is exported as target and as its own draft. Where only PyPI is reached,
# TensorRT proper cannot be installed: see the README.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS
work=${WORK:-$(mktemp -d)}
source=${SOURCE:-smollm2-135m}
on_cpu=false
[ "${1:-}" = --cpu ] && on_cpu=true

said() { printf '── %4d s  %s\n' $((SECONDS - started)) "$*"; }

if [ -n "${PACELINE:-}" ]; then
  python=$PACELINE
else
  said "install into $work/venv"
  "${PYTHON:-python3}" -m venv "$work/venv"
  python=$work/venv/bin/python
  extra=gpu
  "$on_cpu" && extra=cpu
  "$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt ".[$extra,export,tools,trt]"
  "$on_cpu" || "$python" -m pip install --quiet --disable-pip-version-check 'onnxruntime-gpu[cuda,cudnn]'
fi
paceline() { "$python" -m paceline_tools "$@"; }

if "$on_cpu"; then
  sm=8.9
else
  sm=$("$python" -c 'from paceline import cuda; print(cuda.compute_capability())')
fi
# TensorRT-RTX has no engines for data centre GPUs such as the H100 (9.0) and the B200 (10.0).
case $sm in 9.0 | 10.*) backend=${BACKEND:-tensorrt} ;; *) backend=${BACKEND:-tensorrt-rtx} ;; esac
said "compute capability $sm, engines by $backend"

export_pair() { # name, flavour, precision
  [ -e "$work/$1/paceline.json" ] && return
  said "export $1"
  paceline export --target "$source" --draft "$source" --flavor "$2" --precision "$3" --draft-precision "$3" \
    --max-length 1024 --calibration none --no-quality -o "$work/$1"
}
export_pair ort-fp16 ort fp16
export_pair cuda-int4 cuda int4
export_pair trt-fp16 trt fp16
export_pair trt-int4 trt int4
for bundle in trt-fp16 trt-int4; do
  said "check and build $bundle"
  paceline check "$work/$bundle"
  paceline build "$work/$bundle" --sm "$sm" --backend "$backend" --max-draft-tokens 8
done

if "$on_cpu"; then
  said "the programs of the acceptance, with the CPU provider"
  "$python" -m paceline_tools.gpu_acceptance --run "$work/ort-fp16=cpu" --max-new-tokens 16 --repeats 1 --samples 40 \
    -o "$work/cpu"
  said "done; results in $work/cpu.md. No GPU has run anything of this."
  exit
fi

said "doctor"
paceline doctor "$work/ort-fp16" "$work/cuda-int4" "$work/trt-fp16" "$work/trt-int4" || true
said "acceptance"
result=models/results/gpu-sm${sm/./}
status=0
"$python" -m paceline_tools.gpu_acceptance --run "$work/ort-fp16=cuda" --run "$work/cuda-int4=cuda" \
  --run "$work/trt-fp16=$backend-engine" --run "$work/trt-int4=$backend-engine" -o "$result" || status=$?
said "done: $result.json and $result.md"
exit "$status"
