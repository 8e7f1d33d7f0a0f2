"""What a server does with exported files: `python -I elsewhere.py FOLDER`, where squeeze_release cannot be imported.

Runs every .onnx and .pt2 of the folder on `NAME.inputs`, at the batch stored there and at 1; outputs go beside them.
"""

import sys
from pathlib import Path


class Forbidden:
    """Even where the package is installed."""

    def find_spec(self, name, *_):
        if name.partition(".")[0] == "squeeze_release":
            raise ImportError(f"{name} must not be needed here")


def run(path, inputs):
    import torch

    if path.suffix == ".pt2":
        with torch.no_grad():
            output = torch.export.load(path).module()(*inputs)
        output = list(output.values()) if isinstance(output, dict) else output
        return [output] if isinstance(output, torch.Tensor) else list(output)
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = {each.name: tensor.numpy() for each, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, feed)]


def main(folder):
    sys.meta_path.insert(0, Forbidden())
    from safetensors.torch import load_file, save_file

    for path in sorted([*folder.glob("*.onnx"), *folder.glob("*.pt2")]):
        stored = load_file(path.with_suffix(".inputs"))
        inputs = [stored[name] for name in sorted(stored)]
        results = {f"{path.name}.out": inputs, f"{path.name}.out1": [tensor[:1] for tensor in inputs]}
        for name, given in results.items():
            outputs = run(path, given)
            save_file({str(i): output.contiguous() for i, output in enumerate(outputs)}, folder / name)
    assert not [name for name in sys.modules if name.startswith("squeeze_release")]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
