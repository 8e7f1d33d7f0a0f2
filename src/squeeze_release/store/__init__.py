"""Squeezed networks in files: `save`, and `load` into a freshly built full-size model. safetensors, no pickle.

A file holds the tensors, each once, and one JSON text: what the full-size model looked like (so that another one is
recognised), and which of its numbers and modules are others in the narrow network. There is no code in it and no name
of a class to import: the network is made from the model that `load` is given.

    network.py    a network as plain data, and what can be made again of it
    archive.py    the file: written whole or not at all, read with distrust
    rebuild.py    the full-size model becomes the narrow one
    standins.py   our own modules in it
    shapes.py     what the layers need
"""

from __future__ import annotations

import os

from torch import nn

from ..copies import borrow, borrowed
from ..errors import StoreError
from ..masks import bake_masks
from ..unwrap import unwrap
from .archive import Misfit, opened, write
from .network import describe
from .rebuild import rebuild

Path = str | os.PathLike[str]


def save(model: nn.Module, path: Path) -> None:
    """Write a network, squeezed or not, to a safetensors file from which `load` makes it again.

    Masks that are still on it become zeros in its weights. The file appears whole or not at all. Use it for models of
    transformers too: `save_pretrained` writes a config with the old widths, which `from_pretrained` would build.

    >>> import tempfile, torch, squeeze_release as sr
    >>> def build():
    ...     return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> net = build()
    >>> with torch.no_grad():
    ...     _ = net[0].weight[2:].zero_()
    >>> small = sr.squeeze(net, torch.randn(1, 4)).model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sr.save(small, f"{folder}/small.safetensors")
    ...     again = sr.load(build(), f"{folder}/small.safetensors")
    >>> again[0].out_features, torch.equal(again[2].weight, small[2].weight)
    (2, True)
    """
    with borrowed(unwrap(model)) as network:
        bake_masks(network)
        try:
            write(os.path.realpath(path), *describe(network))
        except Misfit as cause:
            raise StoreError(
                cause.what,
                where=cause.where,
                consequence="load could not make this network again; nothing was saved",
                remedy=cause.remedy or "save it before it is changed by hand, and repeat that change after load",
            ) from None


def load(model: nn.Module, path: Path) -> nn.Module:
    """The network in a file, made from a full-size model that was built like the one which was squeezed.

    The model handed in is left as it is. What comes back has its class, code, hooks, device and train/eval mode, and
    from the file the weights, their dtype, memory format and `requires_grad`. It can be trained, squeezed and saved
    again.
    Raises StoreError for a file that is damaged, hostile, or of another model.
    """
    source = unwrap(model)
    try:
        with opened(path) as archive:
            return rebuild(borrow(source), archive)
    except (Misfit, RecursionError) as error:
        cause = error if isinstance(error, Misfit) else Misfit("nested too deep", "its JSON")
        raise StoreError(
            cause.what,
            where=f"{cause.where}, in {os.fspath(path)}",
            consequence="nothing was loaded; the model is as it was",
            remedy=cause.remedy or "save the network again: this file is damaged",
        ) from None
