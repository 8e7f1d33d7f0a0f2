"""One device or many. With an `accelerate.Accelerator` the ranks train together; without, all of this does nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Devices:
    """What ranks do together: they wrap a model anew in each phase, and must agree on all that decides its shape."""

    def __init__(self, accelerator: Any = None) -> None:
        self._accelerator = accelerator
        self.is_main = accelerator is None or bool(accelerator.is_main_process)
        self._many = accelerator is not None and accelerator.num_processes > 1

    def place(self, model: nn.Module) -> nn.Module:
        return model if self._accelerator is None else model.to(self._accelerator.device)

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """The wrapped model and optimizer to train with. A squeezed model has new parameters: it is wrapped anew."""
        if self._accelerator is None:
            return model, optimizer
        self._accelerator.free_memory()  # of the wrappers of the phase before
        wrapped: tuple[nn.Module, Optimizer] = self._accelerator.prepare(model, optimizer)
        return wrapped

    def close(self, model: nn.Module) -> None:
        """Undo what `prepare` may have done to the forward of the model itself (mixed precision)."""
        if self._accelerator is not None:
            self._accelerator.unwrap_model(model, keep_fp32_wrapper=False)

    def mean(self, value: float) -> float:
        """Of all ranks, so that they decide alike."""
        if not self._many:
            return value
        number = torch.tensor(value, dtype=torch.float32, device=self._accelerator.device)
        return float(self._accelerator.reduce(number, "mean"))

    def average(self, scores: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: self._accelerator.reduce(t, "mean") for n, t in scores.items()} if self._many else scores

    @torch.no_grad()
    def agree_on_buffers(self, model: nn.Module) -> None:
        """Running statistics are those of the first rank."""
        if self._many:
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, 0)

    def wait(self) -> None:
        if self._many:
            self._accelerator.wait_for_everyone()
