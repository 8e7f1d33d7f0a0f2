"""The recipes, on data that the tests make; and, where the real data is at hand, for real (slow)."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

import squeeze_release as sr
from squeeze_release import recipes
from squeeze_release.recipes import convnext_cifar10, data, fc_mnist, imagenet, images, training, vit
from squeeze_release.recipes.launch import Launch

DATA = os.environ.get("SQUEEZE_RELEASE_DATA", str(Path(__file__).parents[2] / "shared" / "data"))


def idx(values: numpy.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return gzip.compress(b"\x00\x00\x08" + bytes([values.ndim]) + sizes + values.astype(numpy.uint8).tobytes())


def digits(folder: Path, count: int = 640) -> Path:
    """Images that say their label: ten bright rows, of which one is brighter."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.default_rng(0)
    for part, number in (("train", count), ("t10k", 128)):
        labels = draw.integers(0, 10, number)
        images = draw.integers(0, 60, (number, 28, 28))
        images[numpy.arange(number), 2 * labels + 3, 5:20] += 180
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(labels))
    return folder


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ----------------------------------------------------------------------------------------------------------------- data


def test_mnist_is_read_and_split_the_same_way_every_time(tmp_path: Path) -> None:
    split = data.mnist(digits(tmp_path / "mnist"), validation=100)
    assert [len(part) for part in (split.train, split.validation, split.test)] == [540, 100, 128]
    assert split.train.x.shape == (540, 1, 28, 28) and split.train.x.dtype == torch.uint8
    again = data.mnist(tmp_path, validation=100)  # also from the folder above
    assert torch.equal(split.validation.x, again.validation.x)


def test_the_cache_is_looked_at_after_the_folder(tmp_path: Path) -> None:
    digits(tmp_path / "cache" / "squeeze-release" / "mnist", 200)
    assert len(data.mnist(validation=50).train) == 150
    assert len(data.mnist(digits(tmp_path / "mine"), validation=50).train) == 590


def test_without_data_and_without_network_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(data.urllib.request, "urlopen", offline)
    with pytest.raises(sr.InputError, match="could not be read") as error:
        data.mnist(tmp_path)
    assert "put train-images-idx3-ubyte.gz into one of these folders, or name its folder with --data" in str(
        error.value
    )


def test_a_download_with_another_checksum_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(b"something else"))
    with pytest.raises(sr.InputError, match="another checksum"):
        data.mnist(tmp_path)
    assert not list((tmp_path / "cache").rglob("*.gz"))


def test_a_download_is_checked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = digits(tmp_path / "web", 200)
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda url, **_: (source / url.rpartition("/")[2]).open("rb"))
    sums = {name: data.hashlib.md5((source / name).read_bytes()).hexdigest() for name in data._MNIST_FILES}
    monkeypatch.setattr(data, "_MNIST_FILES", sums)
    assert len(data.mnist(validation=50).train) == 150
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(data.mnist(validation=50).train) == 150  # from the cache


def test_a_file_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    folder = digits(tmp_path)
    raw = gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes())
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(raw[:-5]))
    with pytest.raises(sr.InputError, match="holds 635 bytes, its header says"):
        data.mnist(folder)
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"<html>"))
    with pytest.raises(sr.InputError, match="is no idx file"):
        data.mnist(folder)


def cifar(folder: Path, count: int, strips: bool) -> torch.Tensor:
    """The same images as strips in zip files, or as the published binary archive."""
    folder.mkdir()
    draw = numpy.random.default_rng(1)
    images = draw.integers(0, 256, (6, count, 32, 32, 3)).astype(numpy.uint8)
    labels = draw.integers(0, 10, (6, count)).astype(numpy.uint8)
    if strips:
        for number, name in enumerate(data._CIFAR_BATCHES):
            with zipfile.ZipFile(folder / f"{name}.zip", "w") as file:
                file.writestr("labels.u8", labels[number].tobytes())
                for i, part in enumerate(numpy.split(images[number], 2)):
                    strip = io.BytesIO()
                    Image.fromarray(part.reshape(-1, 32, 3)).save(strip, "WEBP", lossless=True)
                    file.writestr(f"{i:02}.webp", strip.getvalue())
    else:
        with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as archive:
            for number, name in enumerate(data._CIFAR_BATCHES):
                rows = [
                    bytes([y]) + x.transpose(2, 0, 1).tobytes()
                    for x, y in zip(images[number], labels[number], strict=True)
                ]
                member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
                member.size = len(b"".join(rows))
                archive.addfile(member, io.BytesIO(b"".join(rows)))
    return torch.from_numpy(images[5]).permute(0, 3, 1, 2)


@pytest.mark.parametrize("strips", [True, False])
def test_cifar_in_either_format(tmp_path: Path, strips: bool) -> None:
    expected = cifar(tmp_path / "cifar10", 20, strips)
    split = data.cifar10(tmp_path, validation=10)
    assert [len(part) for part in (split.train, split.validation, split.test)] == [90, 10, 20]
    assert torch.equal(split.test.x, expected)


# ------------------------------------------------------------------------------------------------------------- training


def test_ranks_share_every_batch() -> None:
    x, y = torch.arange(20.0)[:, None], torch.arange(20)
    seen = []
    for rank in (0, 1):
        torch.manual_seed(0)
        batches = training.Batches(x, y, 8, rank, 2)
        seen.append([batches.take(*batch)[1].tolist() for batch in batches])
    torch.manual_seed(0)
    batches = training.Batches(x, y, 8)
    whole = [set(batches.take(*batch)[1].tolist()) for batch in batches]
    assert [set(a) | set(b) for a, b in zip(*seen, strict=True)] == whole
    assert all(len(a) == len(b) == 4 for a, b in zip(*seen, strict=True))


def test_crops_are_pieces_of_the_padded_image() -> None:
    x = torch.rand(64, 3, 8, 8)
    out = training.crop_and_mirror(x, 2)
    padded = torch.nn.functional.pad(x, [2] * 4)
    for image, wide in zip(out, padded, strict=True):
        pieces = [wide[:, i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
        assert any(torch.equal(image, piece) or torch.equal(image, piece.flip(-1)) for piece in pieces)
    assert not torch.equal(out, x)


def test_images_and_labels_are_mixed_alike() -> None:
    torch.manual_seed(0)
    y = torch.arange(6)
    labels = torch.nn.functional.one_hot(y, 6).float()
    mix = training.mixing(6, y.device)
    soft, x = mix(labels), mix(labels.view(6, 1, 2, 3))  # images that are their labels
    assert torch.equal(soft, x.view(6, 6)) and not torch.equal(soft, labels)
    torch.testing.assert_close(soft.sum(1), torch.ones(6))
    assert ((soft > 0).sum(1) <= 2).all() and (soft.gather(1, y[:, None]) > 0).all()


def test_a_share_of_distillation() -> None:
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    teacher = torch.nn.Linear(3, 3)
    logits = teacher(x)
    plain = torch.nn.functional.cross_entropy(logits, y)
    assert training.distilled(logits, y, None, x, 0.7) == plain
    # a pupil that says what its teacher says has nothing to learn from it
    assert training.distilled(logits, y, teacher, x, 0.7).item() == pytest.approx(0.3 * plain.item())


# ---------------------------------------------------------------------------------------------------------------- paper


def test_the_paper_preset_of_fc_mnist_is_the_papers() -> None:
    model, config = fc_mnist.build(), fc_mnist.PRESETS["paper"].config
    assert sum(p.numel() for p in model.parameters()) == 193_226
    assert sr.prune.Masks(model, sr.prune.find_targets(model)).total == 191_104
    assert (config.train_epochs, config.prune_epochs, config.finetune_epochs, config.final_epochs) == (160, 160, 20, 20)
    assert (config.schedule, config.last_ratio, config.threshold, config.max_drop) == ("cubic", 0.002, 0.8, 0.1)
    assert (config.score, config.finish_units, config.release_pool, config.release_scale) == (
        "last",
        0.0,
        "column",
        0.01,
    )
    assert fc_mnist.PRESETS["paper"].distillation == 0
    assert config.min_accuracy is None and config.rules == "paper"


def test_the_paper_preset_of_convnext_prunes_what_the_paper_prunes() -> None:
    model, preset = convnext_cifar10.convnext(), convnext_cifar10.PRESETS["paper"]
    assert sum(p.numel() for p in model.parameters()) == 27_827_818
    targets = sr.prune.find_targets(model, skip=preset.config.skip)
    units = {name: target.unit for target in targets for name in target.names}
    assert units["stages.0.blocks.0.conv_dw.weight"] == "filter" and units["head.fc.weight"] == "element"
    assert not any("downsample" in name or name.startswith("stem") for name in units)
    assert len(units) == 18 * 3 + 1
    assert (preset.size, preset.batch, preset.weight_decay, preset.rates["prune"]) == (224, 64, 1e-2, 1e-4)


def test_the_paper_preset_of_vit_masks_rows_of_q_k_and_v_jointly() -> None:
    config = vit.PRESETS["paper"].config
    targets = sr.prune.find_targets(vit.vit(), joint=config.joint)
    assert sum(target.parts == 3 for target in targets) == 12
    assert (config.schedule, config.epochs_an_update, config.threshold, config.finetune_epochs) == (
        "linear",
        2,
        0.6,
        10,
    )
    assert vit.PRESETS["paper"].share == 0.4


# ----------------------------------------------------------------------------------------------------------------- runs


def test_fc_mnist_from_end_to_end(tmp_path: Path) -> None:
    changes = {"train_epochs": 4, "prune_epochs": 4, "finetune_epochs": 2, "final_epochs": 1, "max_cycles": 1}
    launch = Launch(data=digits(tmp_path), run_dir=tmp_path / "run", changes=(*changes.items(), ("threshold", 0.2)))
    result = fc_mnist.run("quick", launch)
    assert result.summary["unpruned_weights"] == 191_104
    assert result.summary["deployable_weights"] == result.summary["mask_alive"] < 191_104
    assert result.summary["accuracy"] > 0.3 and result.summary["max_error"] < 1e-10


def test_distillation_goes_through_a_resume(tmp_path: Path) -> None:
    changes = tuple(
        {"train_epochs": 1, "prune_epochs": 1, "finetune_epochs": 1, "final_epochs": 1, "max_cycles": 1}.items()
    )
    launch = Launch(data=digits(tmp_path), run_dir=tmp_path / "run", changes=(*changes, ("threshold", 0.0)))
    first = fc_mnist.run("best", launch)
    (tmp_path / "run" / "state.safetensors").unlink()
    again = fc_mnist.run("best", replace(launch, resume=True))
    assert again.summary | {"seconds": 0} == first.summary | {"seconds": 0}


@pytest.mark.parametrize("name", ["convnext", "vit"])
def test_best_prunes_whole_channels_of_the_stream_too(name: str) -> None:
    """The preset's own configuration, on a small network and random images."""
    preset = {"convnext": convnext_cifar10, "vit": vit}[name].PRESETS["best"]
    networks = {
        "convnext": lambda: convnext_cifar10.convnext(depths=(1, 1, 2, 1), dims=(16, 24, 32, 48)),
        "vit": lambda: vit.vit(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=10),
    }
    short = {"train_epochs": 1, "prune_epochs": 4, "finetune_epochs": 1, "final_epochs": 1, "max_cycles": 2}
    free = {"threshold": 0.0, "max_drop": 1.0, "min_accuracy": None, "max_loss": None, "final_gain": 0.0}
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (96, 3, 32, 32), generator=draw, dtype=torch.uint8)
    part = data.Images(pixels, torch.randint(10, (96,), generator=draw))
    small = replace(preset, build=networks[name], size=32, batch=32, config=replace(preset.config, **short, **free))
    result = images.run_preset(small, Launch(), data.Split(part, part, part))
    sizes = [point.deployable_params for point in result.points]
    assert sizes[1] < 0.6 * sizes[0] and sizes[2] < 0.7 * sizes[1] and result.summary["max_error"] < 1e-10
    stream = result.model.head.fc.in_features if name == "convnext" else result.model.head.in_features
    assert stream % 8 == 0 and stream < 48


def photographs(folder: Path) -> Path:
    draw = numpy.random.default_rng(2)
    for part, count in (("train", 12), ("val", 4)):
        for name in ("n01", "n02", "n03"):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                picture = draw.integers(0, 256, (50 + i, 60, 3)).astype(numpy.uint8)
                Image.fromarray(picture).save(folder / part / name / f"{i}.JPEG")
    return folder


def test_vit_on_a_folder_of_photographs(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    def small(num_classes: int, pretrained: bool = False) -> torch.nn.Module:
        return vit.vit(img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=2, num_classes=num_classes)

    save_file(small(3).state_dict(), tmp_path / "start.safetensors")
    changes = {
        "prune_epochs": 4,
        "finetune_epochs": 1,
        "final_epochs": 1,
        "max_cycles": 1,
        "threshold": 0.0,
        "max_drop": 1.0,
    }
    launch = Launch(
        data=photographs(tmp_path / "imagenet"), start=tmp_path / "start.safetensors", changes=tuple(changes.items())
    )
    preset = replace(vit.PRESETS["paper"], build=small, size=32, batch=8)
    result = imagenet.run_folder(preset, launch)
    assert result.summary["cycles"] <= 1 and result.summary["max_error"] < 1e-10


def test_a_folder_without_photographs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(sr.InputError, match="there are no images"):
        vit.run("paper", Launch(data=tmp_path))


def test_a_checkpoint_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    cifar(tmp_path / "cifar10", 20, strips=True)
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    with pytest.raises(sr.InputError, match="the checkpoint does not fit"):
        convnext_cifar10.run("quick", Launch(data=tmp_path, start=tmp_path / "bad.safetensors"))


# ----------------------------------------------------------------------------------------------------------------- slow


@pytest.mark.slow
@pytest.mark.skipif(not Path(DATA).is_dir(), reason="no MNIST here; name its folder in SQUEEZE_RELEASE_DATA")
def test_fc_mnist_quick_for_real() -> None:
    result = recipes.load("fc-mnist").run("quick", Launch(data=DATA))
    assert result.summary["deployable_weights"] <= 8000
    assert result.summary["accuracy"] >= 0.95
    assert result.summary["seconds"] < 300


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnext-cifar10", "vit"])
@pytest.mark.skipif(not Path(DATA).is_dir(), reason="no CIFAR-10 here; name its folder in SQUEEZE_RELEASE_DATA")
def test_quick_presets_for_real(name: str) -> None:
    result = recipes.load(name).run("quick", Launch(data=DATA))
    assert result.summary["cycles"] == 2
    assert result.summary["deployable_params"] < result.summary["unpruned_params"]
    assert result.summary["accuracy"] > 0.2  # ten classes, a thousand images, a few epochs
    assert result.summary["max_error"] < 1e-10
