#!/usr/bin/env bash
# What only a GPU can say, in parts that fit into minutes: bash benchmarks/gpu.sh FOLDER tests|eager|norm|compiled ...
#
#   tests     the kernels of CompensatedLayerNorm against float64                                     2 minutes
#   eager     latency.py, called one by one and as CUDA graphs                                        6 minutes
#   norm      layer_norm.py                                                                           2 minutes
#   compiled  latency.py with torch.compile: sixteen processes compile side by side, then measure one after the other,
#             once the first $QUIET seconds (120) are over                                            4 minutes
#
# With batch 1 all wait for the host, whose speed changes from second to second: many short samples are taken then.
# NETWORKS="convnext_tiny vit_small" measures those alone. Peers are measured where they can be imported. What is measured,
# and what is printed, goes to FOLDER.
set -u
cd "$(dirname "$0")/.."
out=$1
shift
mkdir -p "$out"
networks=${NETWORKS:-fc resnet18 convnext_tiny vit_small}
export PYTHONPATH="src:tests:benchmarks${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1

tests() {
  python -u -m pytest -q -p no:cacheprovider tests/test_fused.py tests/test_fused_where.py tests/test_fused_gpu.py \
    tests/test_launch.py tests/test_usual.py tests/test_usual_shortest.py tests/test_usual_build.py 2>&1 | tee "$out/tests.txt"
}

eager() {
  local latency="python -u benchmarks/latency.py --out $out/gpu.csv"
  {
    $latency --how eager --only $networks --batches 1 --rounds 250 --sample 0.005
    $latency --how eager graph --only $networks
  } 2>&1 | tee "$out/gpu.txt"
}

norm() {
  python -u benchmarks/layer_norm.py --out "$out/layer_norm.csv" 2>&1 | tee "$out/layer_norm.txt"
}

compiled() {
  local parts network dtype batch
  parts=$(mktemp -d)
  (flock 9 && sleep "${QUIET:-120}") 9>>"$parts/lock" &
  sleep 1
  for network in $networks; do
    for dtype in float32 bfloat16; do
      for batch in 1 256; do
        TORCHINDUCTOR_CACHE_DIR="$parts/$network-$dtype-$batch" TORCHINDUCTOR_COMPILE_THREADS=2 OMP_NUM_THREADS=2 \
          python -u benchmarks/latency.py --how compiled --only $network --dtypes $dtype --batches $batch \
          $([ $batch = 1 ] && echo --rounds 250 --sample 0.005 || echo --rounds 25) --compile-seconds 250 --in-turns "$parts/lock" \
          --out "$parts/$network-$dtype-$batch.csv" >"$parts/$network-$dtype-$batch.txt" 2>&1 &
      done
    done
  done
  wait
  awk 'FNR > 1 || NR == 1' "$parts"/*.csv >"$out/compiled.csv"
  cat "$parts"/*.txt | tee "$out/compiled.txt"
}

for part in "$@"; do
  "$part"
done
