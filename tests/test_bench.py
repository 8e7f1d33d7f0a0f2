"""Networks side by side on the clock."""

from __future__ import annotations

import json

import pytest
import stored
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import squeeze_release as sr

pytestmark = pytest.mark.usefixtures("one_thread")


def wide(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 256))


def test_a_narrow_network_is_faster_and_smaller() -> None:
    found = sr.bench((wide(4096), wide(64)), torch.randn(16, 256), seconds=0.1)
    assert [(row.name, row.batch) for row in found.rows] == [("before", 16), ("after", 16), ("before", 1), ("after", 1)]
    assert found.speedup() > 5 and found.speedup(1) > 2
    for row in found.rows:
        assert 0 < row.seconds_low <= row.seconds_median <= row.seconds_high and row.calls >= 9
        assert row.throughput == pytest.approx(row.batch / row.seconds_median)
        width = 4096 if row.name == "before" else 64
        assert row.parameter_bytes == 4 * (2 * 256 * width + width + 256) and row.peak_bytes is None
    assert (found.device, found.dtype, found.threads, found.batch) == ("cpu", "float32", 1, 16)


def test_it_prints_and_goes_to_json() -> None:
    found = sr.bench({"one": wide(8), "two": wide(8), "three": wide(8)}, torch.randn(1, 256), seconds=0)
    data = json.loads(json.dumps(found.to_dict()))
    assert data.keys() == {"device", "dtype", "threads", "batch", "rows"} and len(data["rows"]) == 3
    assert data["rows"][1]["name"] == "two" and data["rows"][1]["calls"] == 9
    text = str(found)
    assert "1.00x" in text and "three" in text and "peak memory is not measured on the CPU" in text


class Calls(nn.Module):
    """Notes how it is called."""

    def __init__(self, log: list[object], name: str) -> None:
        super().__init__()
        self.weight, self.name = nn.Parameter(torch.ones(3)), name
        self.register_forward_pre_hook(lambda module, args: log.append((name, len(args[0]), module.training)))

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return x * self.weight


def test_networks_take_turns_in_eval_mode() -> None:
    log: list[object] = []
    models = {name: Calls(log, name).train() for name in "ab"}
    sr.bench(models, torch.randn(2, 3), seconds=0)
    assert not any(training for _, _, training in log) and all(model.training for model in models.values())
    timed = [name for name, size, _ in log if size == 2][2 + 6 :][:18]  # checked once each, warmed up three times
    assert "".join(timed) == "abba" * 4 + "ab"


def test_masks_become_zeros_and_stay_on_the_model() -> None:
    net = stored.fc()
    prune.random_unstructured(net[0], "weight", 0.5)
    sr.bench({"net": net}, torch.randn(2, 4), seconds=0)
    assert hasattr(net[0], "weight_mask")


def test_a_batch_of_1_that_a_network_does_not_take_is_left_out() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.Linear(8, 2))
    assert {row.batch for row in sr.bench({"net": net}, torch.randn(2, 4), seconds=0).rows} == {2}


def test_wrong_arguments() -> None:
    x, net = torch.randn(2, 4), stored.fc()
    with pytest.raises(sr.InputError, match="there are no models"):
        sr.bench({}, x)
    with pytest.raises(sr.InputError, match="3 models without names"):
        sr.bench([net, net, net], x)
    with pytest.raises(sr.InputError, match="other does not run on the example inputs: RuntimeError"):
        sr.bench({"net": net, "other": nn.Linear(5, 2)}, x)
    with pytest.raises(sr.InputError, match="stands for several calls"):
        sr.bench({"net": net}, [x, x])
