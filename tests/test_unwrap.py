"""unwrap: peels what wraps a model, and refuses by name what cannot be rewritten."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from squeeze_release.errors import ModelError
from squeeze_release.unwrap import unwrap


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def refusal(model: object) -> ModelError:
    with pytest.raises(ModelError) as caught:
        unwrap(model)  # type: ignore[arg-type]
    return caught.value


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_plain_module_is_returned_as_it_is():
    model = net()
    assert unwrap(model) is model


def test_data_parallel():
    model = net()
    assert unwrap(nn.DataParallel(model)) is model


@pytest.mark.filterwarnings("ignore")
def test_distributed_data_parallel_compiled_and_nested(process_group):
    model = net()
    parallel = nn.parallel.DistributedDataParallel(model)
    assert unwrap(parallel) is model
    assert unwrap(torch.compile(parallel)) is model


def test_compiled_with_mode_eager():
    model = net()
    assert unwrap(torch.compile(model, backend="eager")) is model


def test_averaged_model_gives_its_own_weights_not_those_of_the_source():
    model = net()
    averaged = AveragedModel(model)
    assert unwrap(averaged) is averaged.module


def test_nested_data_parallel_of_averaged_of_compiled():
    averaged = AveragedModel(net())
    assert unwrap(torch.compile(nn.DataParallel(averaged), backend="eager")) is averaged.module


def test_subclass_of_a_wrapper():
    class Mine(nn.DataParallel):
        pass

    model = net()
    assert unwrap(Mine(model)) is model


def test_a_user_class_of_the_same_name_is_not_a_wrapper():
    class DataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = net()

    model = DataParallel()
    assert unwrap(model) is model


def test_graph_module_is_ordinary():
    graph = torch.fx.symbolic_trace(net())
    assert unwrap(graph) is graph


def test_a_hook_on_the_wrapper_would_be_lost():
    wrapped = nn.DataParallel(net())
    wrapped.register_forward_hook(lambda module, args, output: output + 1)
    error = refusal(wrapped)
    assert "forward hook" in error.what and "DataParallel" in error.what
    assert "wrapped module" in error.remedy


@pytest.mark.parametrize("value", [None, {"weight": torch.zeros(1)}, "model", net])
def test_not_a_module(value):
    error = refusal(value)
    assert type(value).__name__ in error.what
    assert error.where == "the model argument"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.zeros(1, 4))])
@pytest.mark.parametrize("inside", [False, True])
def test_torchscript(make, inside):
    scripted = make(net())
    model = nn.ModuleDict({"body": scripted}) if inside else scripted
    error = refusal(model)
    assert "TorchScript" in error.what
    assert error.where == ("body" if inside else "the model itself")
    assert "Python module" in error.remedy


def test_compiled_child_is_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")))
    error = refusal(model)
    assert "OptimizedModule" in error.what and error.where == "1.0"
    assert error.remedy == "set model.1.0 = model.1.0._orig_mod first"


def test_data_parallel_child_is_refused():
    error = refusal(nn.ModuleDict({"encoder": nn.DataParallel(net())}))
    assert error.where == "encoder" and "encoder.module" in error.remedy


def test_averaged_child_is_an_ordinary_module():
    model = nn.ModuleDict({"student": net(), "teacher": AveragedModel(net())})
    assert unwrap(model) is model


@pytest.mark.filterwarnings("ignore")
def test_fsdp(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    error = refusal(FullyShardedDataParallel(net(), device_id=torch.device("cpu")))
    assert "FSDP" in error.what and "full state dict" in error.remedy
    error = refusal(fully_shard(net(), mesh=init_device_mesh("cpu", (1,))))
    assert "FSDP2" in error.what


@pytest.mark.filterwarnings("ignore")
def test_dtensor(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = net()
    mesh = init_device_mesh("cpu", (1,))
    model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.detach(), mesh, [Replicate()]))
    error = refusal(model)
    assert "DTensor" in error.what and error.where == "2.weight" and "full_tensor()" in error.remedy


@pytest.mark.filterwarnings("ignore")
def test_quantized():
    model = torch.ao.quantization.quantize_dynamic(net(), {nn.Linear}, dtype=torch.qint8)
    error = refusal(model)
    assert "is quantized" in error.what and error.where == "0"
    assert "then quantize" in error.remedy
    model = net()
    model.register_buffer("packed", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    assert "quantized" in refusal(model).what


@pytest.mark.filterwarnings("ignore")
def test_lazy_until_it_has_run_once():
    model = nn.Sequential(nn.LazyLinear(3))
    error = refusal(model)
    assert "lazy" in error.what and error.where == "0.weight"
    model(torch.zeros(1, 5))
    assert unwrap(model) is model


def test_meta_weights_have_no_values():
    error = refusal(nn.Linear(3, 2, device="meta"))
    assert "meta" in error.what and error.where == "weight"


def test_complex_parameters_are_refused_and_complex_buffers_are_not():
    assert "complex" in refusal(nn.Linear(3, 2, dtype=torch.complex64)).what
    model = net()
    model.register_buffer("rotary", torch.zeros(2, dtype=torch.complex64))
    assert unwrap(model) is model


@pytest.mark.filterwarnings("ignore")
def test_sparse_parameters():
    model = nn.Module()
    model.weight = nn.Parameter(torch.eye(3).to_sparse())
    assert "sparse" in refusal(model).what


def test_the_message_has_four_lines():
    lines = str(refusal(nn.Linear(3, 2, device="meta"))).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["where", "consequence", "remedy"]
