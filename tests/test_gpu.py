"""What only a GPU can show; all of it is skipped elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import squeeze_release as sr
from squeeze_release.copies import hollow_on_cpu
from squeeze_release.cycle import Epoch
from squeeze_release.prune import AveragedScores, Masks, find_targets, gradient_times_weight
from squeeze_release.recipes.graphs import Replayed
from squeeze_release.recipes.launch import Launch
from squeeze_release.recipes.training import Batches, Training
from squeeze_release.rehearse import Rehearsal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class OneGpu(Launch):
    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]


class ManySteps(Launch):
    """The same, without graphs."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]
    one_gpu = False  # type: ignore[assignment]


def optimizers() -> dict[str, Any]:
    return {
        "SGD": lambda net: SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=5e-4),
        "AdamW": lambda net: AdamW(net.parameters(), 1e-3, fused=True, capturable=True),
    }


@pytest.mark.parametrize("name", optimizers())
@pytest.mark.parametrize("distillation", [0.0, 0.5])
def test_a_step_that_is_replayed_trains_as_one_that_is_not(name: str, distillation: float) -> None:
    x, y = torch.randn(640, 12, device="cuda"), torch.randint(4, (640,), device="cuda")
    net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).double().cuda()
    teacher, outcomes = copy.deepcopy(net).eval(), []
    for launch in (OneGpu(), ManySteps()):
        model = copy.deepcopy(net)
        optimizer, masks, seen = _prepared(model, optimizers()[name](model))
        training = Training(Batches(x.double(), y, 32), {"prune": 0.01, "final": 0.01}, launch, distillation)
        for index, phase in enumerate(["prune", "final", "final"]):
            torch.manual_seed(index)
            training(model, optimizer, Epoch(phase, 1, index, 3, lambda: teacher))
            masks.prune(gradient_times_weight(model), keep=0.6 - 0.1 * index)
        outcomes.append({**model.state_dict(), **seen(model), "alive": torch.tensor(masks.alive)})
    one, other = outcomes
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=1e-9, atol=1e-12)


def _prepared(model: nn.Module, optimizer: Optimizer) -> tuple[Optimizer, Masks, AveragedScores]:
    masks, names = Masks(model, find_targets(model)), [n for t in find_targets(model) for n in t.names]
    seen = AveragedScores(model, names)
    optimizer.register_step_post_hook(masks.keep)
    optimizer.register_step_pre_hook(seen.see)
    return optimizer, masks, seen


def test_images_move_anew_in_every_step_that_is_replayed() -> None:
    x: Tensor = torch.arange(64.0, device="cuda").view(1, 1, 8, 8).repeat(16, 1, 1, 1)
    batches, seen = Batches(x, torch.zeros(16, dtype=torch.long, device="cuda"), 4, pad=2), []
    place = torch.zeros(4, 1, 8, 8, device="cuda")
    step = Replayed(lambda numbers: _into(place, batches.take(numbers)[0]))
    for _ in range(3):
        for batch in batches:
            step(*batch)
            seen.append(place.clone())
    assert len({tuple(image.flatten().tolist()) for image in seen}) == len(seen) == 12


def _into(place: Tensor, x: Tensor) -> None:
    place.copy_(x)


def test_what_may_fail_is_tried_where_an_index_out_of_bounds_does_no_harm() -> None:
    """On a GPU it would end the process: nothing after it runs."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(400, 8), nn.ReLU(), nn.Linear(8, 4)).cuda()
    with torch.no_grad():
        net[1].weight[:, 20:40] = 0
        net[1].weight[4:] = 0
    x = torch.randn(4, 1, 20, 20, device="cuda")
    small, _ = sr.squeeze(net, x)
    assert small[1].in_features == 380  # gathers its inputs by index: images of another size hold too few
    with torch.no_grad():
        small[1].weight[1:] = 0
    smaller, _ = sr.squeeze(small, x)
    torch.cuda.synchronize()
    assert smaller[1].out_features == 1
    torch.testing.assert_close(smaller(x), small(x))


def test_a_twin_on_the_cpu_holds_no_weights_and_tells_what_fails() -> None:
    net = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 4)).cuda()
    good, bad = (((torch.tensor([[n]], device="cuda"),), {}) for n in (4, 5))
    rehearsal = Rehearsal(net, [good])
    assert rehearsal.ready and rehearsal.allows(good) and not rehearsal.allows(bad)
    twin = hollow_on_cpu(net)
    assert twin[1].weight.device.type == "cpu" and twin[1].weight.untyped_storage().nbytes() == 4


def test_code_that_names_its_device_is_not_rehearsed() -> None:
    class Names(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.ones(4, device="cuda"))

    call: Any = ((torch.ones(2, 4, device="cuda"),), {})
    rehearsal = Rehearsal(Names(4, 4).cuda(), [call])
    assert not rehearsal.ready and rehearsal.allows(call)


def test_a_cycle_on_the_gpu() -> None:
    training = tiny.Training()
    training.x, training.y = training.x.cuda(), training.y.cuda()
    training.validation, training.testing = ((x.cuda(), y.cuda()) for x, y in (training.validation, training.testing))
    result = tiny.run(model=tiny.network().cuda(), training=training)
    assert result.summary["cycles"] == 3 and result.summary["max_error"] < 1e-10


def test_bench_measures_memory() -> None:
    nets = [nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 256)) for width in (4096, 64)]
    found = sr.bench(nets, torch.randn(256, 256), device="cuda", seconds=0.1)
    assert found.device.startswith("cuda") and {row.batch for row in found.rows} == {256, 1}
    before, after = (row.peak_bytes for row in found.rows[:2])
    assert before is not None and after is not None and before > 256 * 4096 * 4 > after > 0


def test_exported_from_a_gpu(tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).cuda(), torch.randn(2, 4, device="cuda")
    for suffix in (".onnx", ".pt2"):
        sr.export(net, x, tmp_path / f"net{suffix}")
    assert net[0].weight.is_cuda
