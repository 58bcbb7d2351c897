#!/usr/bin/env bash
# Installs the Python package from this tree with pip, as a user with PyTorch does, and uses it from
# another folder: pip_check.sh FOLDER. Without a network; needs scikit-build-core, which
# `scripts/gpu_prefix --python` fetches.
#   DEVICE  cuda, or cpu where there is none (cuda)
#   PREFIX  dependencies outside the system, as for benchmarks/gpu/run.sh, which sets what goes with it
set -euo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)/python/leeway
rm -rf "$1"
mkdir -p "$1/elsewhere"
folder=$(cd "$1" && pwd)
command -v nvcc > /dev/null || export PATH=$PATH:/usr/local/cuda/bin
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
if [ -n "${PREFIX:-}" ]; then
  export CMAKE_PREFIX_PATH=$PREFIX:$PREFIX/lib/x86_64-linux-gnu/cmake:$PREFIX/share/cmake
fi
# What runs must be what pip installed, not the tree.
unset LEEWAY_OPS
tools=$(python3 -c 'import os, scikit_build_core as s; print(os.path.dirname(os.path.dirname(s.__file__)))')
export PYTHONPATH=$tools
began=$SECONDS
python3 -m pip install -q --no-build-isolation --no-index --no-deps --target "$folder/site" \
  --config-settings=build-dir="$folder/build" "$source"
built=$((SECONDS - began))
cd "$folder/elsewhere"
PYTHONPATH=$folder/site python3 - "${DEVICE:-cuda}" "$folder/site" << 'CHECK'
import os
import sys

import torch

import leeway

device, site = sys.argv[1:]
assert os.path.dirname(leeway.__file__) == os.path.join(site, "leeway"), leeway.__file__
torch.manual_seed(0)
hidden = torch.randn(4, 6, 32, device=device, requires_grad=True)
weight = torch.randn(50, 32, device=device, requires_grad=True)
targets = torch.randint(50, (4, 6), device=device)
mask = torch.ones(4, 6, dtype=torch.bool, device=device)
advantages = torch.randn(4, device=device)
rollout = (hidden @ weight.t()).log_softmax(-1).gather(2, targets[..., None]).squeeze(2).detach()
logprobs, _ = leeway.token_logprobs(hidden, weight, targets)
loss, _ = leeway.policy_loss(logprobs, rollout=rollout, advantages=advantages, mask=mask)
loss.backward()
pair = hidden.grad.clone(), weight.grad.clone()
hidden.grad = weight.grad = None
# The ratio is 1 everywhere, so that nothing is masked: the gradient is that of -A log pi.
expected = -((hidden @ weight.t()).log_softmax(-1).gather(2, targets[..., None]).squeeze(2)
             * advantages[:, None]).mean()
expected.backward()
# float32 sums of 50 and of 24 terms, whose order differs.
for ours, theirs in zip(pair, (hidden.grad, weight.grad)):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
print(f"installed with pip: policy_loss on {device} has the gradient of torch's")
CHECK
echo "pip_check passed: built in $built s with torch $(python3 -c 'import torch; print(torch.__version__)')"
