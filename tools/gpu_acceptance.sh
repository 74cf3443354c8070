#!/usr/bin/env bash
# Everything that a GPU has to prove, on a fresh machine with an NVIDIA GPU. Not yet run on one; it is meant to take less
# than ten minutes there (--cpu took 19 on two cores that did other things, too):
#
#   tools/gpu_acceptance.sh            installs into a fresh environment, exports, builds, runs; writes models/results/gpu-*
#   tools/gpu_acceptance.sh --cpu      the part that needs no GPU: the same bundles and programs with the CPU provider
#
# Variables: PYTHON, the interpreter; WORK, where bundles and results of --cpu go (a temporary folder); PACELINE, an
# interpreter that has paceline with its extras, instead of an installation; BACKEND, tensorrt-rtx or tensorrt; SOURCE, what
# is exported as target and as its own draft. GPUs that TensorRT-RTX does not serve (9.0, 10.x) need TensorRT proper, from
# NVIDIA's index: where that is not reached, all but the engines is run, and the exit code is 1.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS
work=${WORK:-$(mktemp -d)}
source=${SOURCE:-smollm2-135m}
on_cpu=false
[ "${1:-}" = --cpu ] && on_cpu=true

said() { printf '── %4d s  %s\n' $((SECONDS - started)) "$*"; }

if ! "$on_cpu" && ! nvidia-smi -L; then
  echo "This machine has no NVIDIA GPU with a driver that answers; --cpu runs what needs none." >&2
  exit 1
fi

if [ -n "${PACELINE:-}" ]; then
  python=$PACELINE
else
  said "install into $work/venv"
  "${PYTHON:-python3}" -m venv "$work/venv"
  python=$work/venv/bin/python
  extra=gpu
  "$on_cpu" && extra=cpu
  # torch exports, on the CPU: its package for CUDA is ten times the download.
  torch=https://download.pytorch.org/whl/cpu
  curl -m 5 -sfIo /dev/null "$torch/" && torch="--extra-index-url $torch" || torch=
  install=("$python" -m pip install --quiet --disable-pip-version-check)
  # shellcheck disable=SC2086
  "${install[@]}" -c constraints.txt $torch ".[$extra,export,tools,trt]"
  "$on_cpu" || "${install[@]}" 'onnxruntime-gpu[cuda,cudnn]'
fi
paceline() { "$python" -m paceline_tools "$@"; }

if "$on_cpu"; then
  sm=8.9
else
  sm=$("$python" -c 'import sys; from paceline import cuda, errors
try: print(cuda.compute_capability())
except errors.PacelineError as error: sys.exit(str(error))')
fi
# TensorRT-RTX has no engines for data centre GPUs such as the H100 (9.0) and the B200 (10.0).
case $sm in 9.0 | 10.*) backend=${BACKEND:-tensorrt} ;; *) backend=${BACKEND:-tensorrt-rtx} ;; esac
engines=(trt-fp16 trt-int4)
status=0
if [ "$backend" = tensorrt ] && ! "$python" -c 'import tensorrt' 2>/dev/null; then
  said "install TensorRT from NVIDIA's index"
  if ! "$python" -m pip install --quiet 'tensorrt-cu13<12' --extra-index-url https://pypi.nvidia.com; then
    engines=()
    status=1
    said "TensorRT cannot be installed: NO ENGINES ARE RUN"
  fi
fi
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
for bundle in "${engines[@]}"; do
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
runs=(--run "$work/ort-fp16=cuda" --run "$work/cuda-int4=cuda")
for bundle in "${engines[@]}"; do runs+=(--run "$work/$bundle=$backend-engine"); done
"$python" -m paceline_tools.gpu_acceptance "${runs[@]}" -o "$result" || status=$?
said "done: $result.json and $result.md"
exit "$status"
