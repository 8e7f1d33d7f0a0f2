"""Training across the moment when C++ arrives: losses and weights must be those of Python alone.

XDG_CACHE_HOME=$(mktemp -d) python across.py 6000; CXX=false XDG_CACHE_HOME=$(mktemp -d) python across.py 6000
"""

import hashlib
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from squeeze_release import CompensatedLayerNorm
from squeeze_release.modules.kernels import usual


def norm(width: int) -> CompensatedLayerNorm:
    made = CompensatedLayerNorm(width)
    made.merge(torch.randn(width // 2))
    return made


class Block(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


torch.manual_seed(0)
blocks = [Block(norm(256), nn.Linear(256, 256), nn.GELU()) for _ in range(12)]
network = nn.Sequential(*blocks, norm(256), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
x, y = torch.randn(4096, 256, device="cuda"), torch.randint(0, 10, (4096,), device="cuda")
started, arrived, first = time.time(), None, 0.0
for step in range(int(sys.argv[1])):
    some = torch.arange(step * 64, step * 64 + 64, device="cuda") % 4096
    loss = F.cross_entropy(network(x[some]), y[some])
    first = loss.item() if step == 0 else first
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if arrived is None and usual.compiled() is not None:
        arrived = step
        print(f"C++ at step {step}, after {time.time() - started:.1f} s", flush=True)
print(f"loss {first} to {loss.item()}, {time.time() - started:.1f} s")
print(hashlib.sha256(b"".join(each.detach().cpu().numpy().tobytes() for each in network.parameters())).hexdigest())
