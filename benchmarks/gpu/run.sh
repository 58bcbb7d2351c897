#!/usr/bin/env bash
# Builds for CUDA, checks and measures on one NVIDIA GPU. Stages, all of them without arguments:
#   benchmarks/gpu/run.sh [build] [check] [head] [hosts] [loss] [model] [parts] [memory] [lora] \
#                         [loop] [swap] [pip] [sanitize]
#
#   BUILD   build folder                                    (build-gpu)
#   OUT     where results go, gpu_*.json and gpu_*.jsonl    (benchmarks/results)
#   PREFIX  dependencies outside the system: a folder with include/, lib/ and, with --python,
#           python/, as scripts/gpu_prefix makes it
#   COMMIT  the commit being measured, where git does not know it
#
# Needs a CUDA build of PyTorch that python3 can import; the stage `model` needs transformers. A
# failing stage does not stop the next. Tables and failures are printed last.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
BUILD=${BUILD:-build-gpu}
OUT=${OUT:-benchmarks/results}
PREFIX=${PREFIX:-}
export PYTHONUNBUFFERED=1
stages=("$@")
known=(build check head hosts loss model parts memory lora loop swap pip sanitize)
[ ${#stages[@]} -gt 0 ] || stages=("${known[@]}")
for stage in "${stages[@]}"; do
  case " ${known[*]} " in
    *" $stage "*) ;;
    *) echo "run.sh: $stage: no such stage; there are ${known[*]}" >&2
       exit 2 ;;
  esac
done

mkdir -p "$BUILD" "$OUT"
BUILD=$(cd "$BUILD" && pwd)
OUT=$(cd "$OUT" && pwd)
logs=$BUILD/gpu-logs
mkdir -p "$logs"
library=$BUILD/libleeway_ops.so
# For `import leeway`.
export LEEWAY_OPS=$library PYTHONPATH=$root/python/leeway${PYTHONPATH:+:$PYTHONPATH}

failed=()
tables=()
# step NAME SECONDS COMMAND ..: runs it with a limit, output into a log; its end is shown on
# failure.
step() {
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  timeout "$limit" "$@" > "$logs/$name.txt" 2>&1
  local code=$?
  echo "== $name: exit $code, $((SECONDS - begin)) s"
  if [ $code -ne 0 ]; then
    failed+=("$name")
    tail -n 40 "$logs/$name.txt"
  fi
  return $code
}

use_prefix() {
  [ -n "$PREFIX" ] || return 0
  PREFIX=$(cd "$PREFIX" && pwd)
  local lib=$PREFIX/lib/x86_64-linux-gnu
  # The pkg-config files name the system's folders.
  mkdir -p "$BUILD/pkgconfig"
  find "$PREFIX" -name '*.pc' | while read -r file; do
    sed "s#^prefix=.*#prefix=$PREFIX#; s#=/usr/#=$PREFIX/#g; s#-L/usr/lib#-L$PREFIX/lib#g" \
      "$file" > "$BUILD/pkgconfig/$(basename "$file")"
  done
  export PKG_CONFIG_PATH=$BUILD/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
  export LD_LIBRARY_PATH=$lib:$PREFIX/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export LIBRARY_PATH=$lib:$PREFIX/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
  export CPATH=$PREFIX/include${CPATH:+:$CPATH}
  [ ! -d "$PREFIX/python" ] || PYTHONPATH=$PYTHONPATH:$PREFIX/python
}

build() {
  local torch paths targets=()
  # Run from /, since a folder named torch in the working directory would be imported instead.
  torch=$(cd / && python3 -c 'import torch; print(torch.utils.cmake_prefix_path)') || {
    failed+=("python3 has no torch")
    return 1
  }
  paths=$torch
  local options=(-DCMAKE_BUILD_TYPE=Release)
  if [ -n "$PREFIX" ]; then
    paths="$paths;$PREFIX;$PREFIX/lib/x86_64-linux-gnu/cmake;$PREFIX/share/cmake"
    local chart=$PREFIX/share/javascript/chart.js/chart.min.js
    [ ! -f "$chart" ] || options+=("-DLEEWAY_CHART_JS=$chart")
  fi
  command -v nvcc > /dev/null || export PATH=$PATH:/usr/local/cuda/bin
  export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
  step configure 120 cmake -G Ninja -S "$root" -B "$BUILD" "-DCMAKE_PREFIX_PATH=$paths" \
    "${options[@]}" || return 1
  for target in leeway_ops leeway_cuda_module leeway gpu_model_benchmark gpu_memory_table \
    gpu_ranks_steps gpu_lora_step gpu_weight_swap gpu_sampling_precision gpu_training_parts \
    gpu_sampling_parts cuda_core_test devices_test torch_decoder_test torch_sampling_test \
    torch_training_test torch_symbols_test; do
    if ninja -C "$BUILD" -t query "$target" > /dev/null 2>&1; then
      targets+=("$target")
    else
      echo "   no target $target in this tree"
    fi
  done
  # If one target does not compile, the others can still be measured.
  step compile 500 ninja -C "$BUILD" -k 0 "${targets[@]}"
  echo "   slowest, in seconds:"
  awk '!/^#/ {n = split($4, p, "/"); printf "   %6.1f %s\n", ($2 - $1) / 1000, p[n]}' \
    "$BUILD/.ninja_log" | sort -rn | awk '!seen[$2]++' | head -n 5
}

# beside NAME SECONDS COMMAND ..: as step, at the same time as up to three others.
started=()
beside() {
  local name=$1 limit=$2
  shift 2
  started+=("$name")
  while [ "$(jobs -rp | wc -l)" -ge 4 ]; do wait -n; done
  {
    local begin=$SECONDS
    # Four times as many threads as cores are many times slower than one for each.
    OMP_NUM_THREADS=$(($(nproc) / 4 + 1)) timeout "$limit" "$@" > "$logs/$name.txt" 2>&1
    echo "$? $((SECONDS - begin))" > "$logs/$name.status"
  } &
}
# Waits for all of them and shows how each ended, with the lines of its log that match a pattern.
join_all() {
  local name code seconds
  wait
  for name in "${started[@]}"; do
    read -r code seconds < "$logs/$name.status"
    echo "== $name: exit $code, $seconds s"
    if [ "$code" -eq 0 ]; then
      grep -E "$1" "$logs/$name.txt"
    else
      failed+=("$name")
      tail -n 40 "$logs/$name.txt"
    fi
  done
  started=()
}

check() {
  [ -x "$BUILD/cuda_core_test" ] || failed+=("cuda_core_test is missing")
  beside ops_check 240 python3 tests/gpu/ops_check.py "$library"
  for test in "$BUILD"/cuda_*_test "$BUILD"/torch_*_test "$BUILD"/devices_test; do
    [ -x "$test" ] || continue
    beside "$(basename "$test")" 240 "$test" --gtest_brief=1
  done
  if [ -x "$BUILD/leeway" ]; then
    rm -rf "$BUILD/quick-start"
    beside quick_start 120 "$BUILD/leeway" train --set model.device=cuda \
      --set output_dir="$BUILD/quick-start"
    beside lora_check 120 tests/gpu/lora_check.sh "$BUILD/leeway" "$BUILD/lora-check"
    beside on_policy_check 120 tests/gpu/on_policy_check.sh "$BUILD/leeway" "$BUILD/on-policy-check"
  fi
  if [ -x "$BUILD/leeway" ] && grep -q '^GLOO_LIBRARY:.*[^D]$' "$BUILD/CMakeCache.txt"; then
    beside ranks_check 240 tests/gpu/ranks_check.sh "$BUILD/leeway" "$BUILD/ranks-check"
  fi
  beside pytorch_loss 60 python3 examples/pytorch_loss.py "$library"
  beside package_check 240 python3 tests/gpu/package_check.py
  beside package_tests 240 env LEEWAY_TEST_DEVICE=cuda python3 -m pytest -q -p no:cacheprovider \
    python/leeway/tests/test_{losses,correction,slime,prime_rl}.py
  if python3 -c 'import transformers' 2> /dev/null; then
    beside transformers_check 240 python3 tests/gpu/transformers_check.py "$BUILD/leeway"
  else
    echo "   no transformers: its check is left out"
  fi
  join_all 'test(s|) from|PASSED|compared|^held-out|steps, .* rollouts|^rl:|cases|passed'
}

# measure NAME SECONDS ARGUMENTS ..: runs a script of this folder and keeps its table for the end.
measure() {
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" python3 "benchmarks/gpu/$name.py" "$@" --output "$OUT/gpu_$name.json"
  tables+=("$logs/$name.txt")
}

# kept NAME SECONDS PROGRAM ..: runs a program that prints JSON lines, and keeps these behind a line
# that says where and how; they are shown at the end.
kept() {
  local name=$1
  shift
  step "$name" "$@"
  local code=$?
  if ! grep -q '^{' "$logs/$name.txt"; then  # results of an earlier run stay
    [ $code -ne 0 ] || failed+=("$name: no results")
    return 1
  fi
  {
    python3 - "$(basename "$2") ${*:3}" << 'CONTEXT'
import json, sys
sys.path.insert(0, "benchmarks/gpu")
from common import context
print(json.dumps(context(sys.argv[1].strip())))
CONTEXT
    grep '^{' "$logs/$name.txt"
  } > "$OUT/gpu_$name.jsonl"
  tables+=("$logs/$name.txt")
  return $code
}

# Kernels by family: a name, a program, and a filter of its tests. Each is a process of its own under
# each tool. Tests that compare the bits of large cases are left out, and others have small cases
# (LEEWAY_SMALL_TESTS).
sanitized_tests=(
  'attention cuda_core_test Attention.*-*SameBits*'
  'low_rank cuda_core_test Crc32c.*:Finite.*:LowRank.*'
  'coded_rows cuda_core_test CodedRows.*'
  'coded_products cuda_core_test CodedProducts.AreSums*:CodedProducts.OfRows*'
  'loss cuda_core_test GpuLoss.*-*EveryPreset'
  'loss_presets cuda_core_test GpuLoss.*EveryPreset'
  'head cuda_core_test GpuHead.*-*Every*:*Invariant*'
  'optimizer torch_decoder_test FlatAdamW.*:FlatMoments.*'
  'rows torch_decoder_test LayerRows.*'
  'norm_gradients torch_decoder_test TrainingOperations.GradientsOfNorms*'
  'many_norms torch_decoder_test TrainingOperations.NormsOfManyRows*'
  'head_gradients torch_decoder_test TrainingOperations.GradientsOfHeads*'
  'trunk torch_decoder_test Trunk.AddsToGradients*:Trunk.Gives*'
  'draws torch_sampling_test SamplingOperations.Draws*:SamplingOperations.Says*:DrawnLogprobs.AreThose*-*ByItsShare*'
  'pages torch_sampling_test SamplingOperations.Attends*:SamplingOperations.NeverReads*'
  'sampling_rows torch_sampling_test SamplingOperations.*-*.Draws*:*.Says*:*.Attends*:*.NeverReads*:*.ManyRows*'
  'many_heads torch_sampling_test SamplingOperations.ManyRows*'
  'products cuda_core_test Products.EqualADotProduct*:Products.Gated*'
  'parts_of_a_device cuda_core_test DevicePart.*'
  'split_masters torch_decoder_test SplitMasters.*'
)
sanitize_seconds=200
# sanitized TOOL FAMILY PROGRAM FILTER [OPTION ..]: one family under one tool, output into a log.
sanitized() {
  local tool=$1 family=$2 program=$3 filter=$4 begin=$SECONDS
  shift 4
  if [ "$tool" = racecheck ]; then
    # In these racecheck ends with an error of its own, and in products of codes.
    local ends='GpuHead.BfloatGradientsInEitherType:DrawnLogprobs.*'
    ends=$ends:'SamplingOperations.AGatedProduct*:Products.Gated*'
    case $filter in
      *-*) filter=$filter:$ends ;;
      *) filter=$filter-$ends ;;
    esac
    # Its keys and values have one lane that arrives for its warp, which racecheck takes for a race.
    set -- "$@" ${without_warpgroups[@]+"${without_warpgroups[@]}"}
  fi
  # Without torch's caching allocator every tensor is an allocation whose bounds are checked.
  LEEWAY_SMALL_TESTS=1 OMP_NUM_THREADS=2 PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    timeout "$sanitize_seconds" "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 "$@" \
    "$BUILD/$program" --gtest_brief=1 "--gtest_filter=$filter" > "$logs/${tool}_$family.txt" 2>&1
  echo "$? $((SECONDS - begin))" > "$logs/${tool}_$family.status"
}

sanitize() {
  local sanitizer only_ours=() without_warpgroups=() begin=$SECONDS help family program filter code seconds
  local tool tools=(racecheck memcheck synccheck)
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  if [ ! -x "$sanitizer" ]; then
    echo "   no compute-sanitizer"
    return 0
  fi
  # Only our kernels where the tool can tell: racecheck does not know the barriers of cuBLAS, and
  # instrumenting every kernel of PyTorch takes minutes.
  help=$("$sanitizer" --help 2>&1)
  for option in --kernel-name --kernel-regex; do
    if grep -q -- "$option " <<< "$help"; then
      only_ours=("$option" kns=leeway)
      break
    fi
  done
  for option in --kernel-name-exclude --kernel-regex-exclude; do
    if grep -q -- "$option " <<< "$help"; then
      without_warpgroups=("$option" kns=warpgroups_kernel)
      break
    fi
  done
  # The slowest tool first; as many at a time as leave each a core.
  for tool in "${tools[@]}"; do
    for entry in "${sanitized_tests[@]}"; do
      read -r family program filter <<< "$entry"
      if [ "$tool $family" = 'racecheck coded_products' ]; then continue; fi
      rm -f "$logs/${tool}_$family.status"
      while [ "$(jobs -rp | wc -l)" -ge $(($(nproc) / 2 + 1)) ]; do wait -n; done
      sanitized "$tool" "$family" "$program" "$filter" ${only_ours[@]+"${only_ours[@]}"} &
    done
  done
  step memcheck_ops "$sanitize_seconds" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    "$sanitizer" --tool memcheck --error-exitcode 9 ${only_ours[@]+"${only_ours[@]}"} \
    python3 tests/gpu/ops_check.py "$library" strides head_backward nothing_trained
  wait
  for tool in "${tools[@]}"; do
    for entry in "${sanitized_tests[@]}"; do
      read -r family program filter <<< "$entry"
      if [ "$tool $family" = 'racecheck coded_products' ]; then continue; fi
      read -r code seconds < "$logs/${tool}_$family.status"
      echo "== ${tool}_$family: exit $code, $seconds s; $(grep -E 'PASSED' "$logs/${tool}_$family.txt" | head -n 1)" \
        "$(grep -E 'SUMMARY' "$logs/${tool}_$family.txt" | tail -n 1)"
      [ "$code" -eq 0 ] && continue
      failed+=("${tool}_$family")
      tail -n 8 "$logs/${tool}_$family.txt"
    done
  done
  echo "   $((SECONDS - begin)) s"
}

use_prefix
began=$SECONDS
for stage in "${stages[@]}"; do
  echo "---- $stage"
  case $stage in
    head) measure head 300 "$library" ;;
    hosts)
      measure hosts 120
      if python3 -c 'import importlib.util as u, sys; sys.exit(u.find_spec("trl") is None)'; then
        measure trl_step 180
      else
        echo "   no trl: its step is left out"
      fi
      ;;
    loss) measure loss 90 "$library" ;;
    model) measure model 590 --program "$BUILD/gpu_model_benchmark" ;;
    parts)
      kept training_parts 60 "$BUILD/gpu_training_parts"
      kept sampling_parts 60 "$BUILD/gpu_sampling_parts"
      ;;
    memory) measure memory 580 --program "$BUILD/gpu_memory_table" ;;
    lora) measure lora 530 --program "$BUILD/gpu_lora_step" ;;
    loop) measure loop 490 --program "$BUILD/leeway" ;;
    pip) step pip 300 tests/gpu/pip_check.sh "$BUILD/pip-check" && tail -n 1 "$logs/pip.txt" ;;
    swap) kept weight_swap 60 "$BUILD/gpu_weight_swap" ;;
    *) "$stage" ;;
  esac
done
echo "---- $((SECONDS - began)) s in all"
for file in ${tables[@]+"${tables[@]}"}; do cat "$file"; done
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]} (logs in $logs)"
  exit 1
fi
