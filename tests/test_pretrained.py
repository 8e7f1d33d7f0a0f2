"""save_pretrained of a squeezed model of transformers: an error that says what to do, and nothing else changed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import stored
import torch
from check import noisy
from nets import Net
from torch import nn

import squeeze_release as sr


@pytest.fixture(scope="module", params=["llama", "bert"])
def squeezed(request) -> tuple[str, nn.Module, nn.Module]:
    model = stored.prune(noisy(stored.MODELS[request.param]()).eval(), 0)
    return request.param, model, sr.squeeze(model, stored.inputs(request.param), verify=False).model


def test_save_pretrained_says_what_to_do(squeezed, tmp_path: Path) -> None:
    name, model, small = squeezed
    with pytest.raises(sr.StoreError, match=r"its config says the widths from before(.|\n)*squeeze_release\.save"):
        small.save_pretrained(tmp_path / "small")
    assert not [*tmp_path.iterdir()]
    model.save_pretrained(tmp_path / "full")  # the one that was handed in is as it was
    sr.save(small, tmp_path / "small")
    again = sr.load(stored.MODELS[name]().eval(), tmp_path / "small")
    stored.same(small, again, stored.inputs(name))
    with pytest.raises(sr.StoreError):
        again.save_pretrained(tmp_path / "again")


def test_all_else_works_as_before(squeezed, tmp_path: Path) -> None:
    name, model, small = squeezed
    assert type(small) is type(model) and "save_pretrained" not in small.state_dict()
    torch.save(small, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    others = [copy.deepcopy(small), pickle.loads(pickle.dumps(small)), whole]
    for other in others:
        stored.same(small, other, stored.inputs(name))
        with pytest.raises(sr.StoreError):
            other.save_pretrained(tmp_path)
    torch.save(small.state_dict(), tmp_path / "state.pt")
    small.load_state_dict(torch.load(tmp_path / "state.pt"))
    del others[0].save_pretrained  # for those who know better
    others[0].save_pretrained(tmp_path / "own")
    assert (tmp_path / "own" / "config.json").exists()


def test_where_nothing_was_removed_it_stays(tmp_path: Path) -> None:
    model = noisy(stored.bert()).eval()
    same, report = sr.squeeze(model, stored.inputs("bert"), verify=False)
    assert report.params_before == report.params_after
    same.save_pretrained(tmp_path / "same")
    again = type(model).from_pretrained(tmp_path / "same").eval()
    assert all(map(torch.equal, stored.run(again, stored.inputs("bert")), stored.run(model, stored.inputs("bert"))))


def test_a_part_of_another_model(tmp_path: Path) -> None:
    from transformers import BertModel

    parts = {name: BertModel(stored.bert().config, add_pooling_layer=False) for name in ("one", "two")}
    net = noisy(Net(lambda s, x: s.one(x)[0] + s.two(x)[0], **parts)).eval()
    with torch.no_grad():
        net.one.encoder.layer[0].intermediate.dense.weight[:5] = 0
    small = sr.squeeze(net, stored.inputs("bert"), verify=False).model
    with pytest.raises(sr.StoreError):
        small.one.save_pretrained(tmp_path / "one")
    small.two.save_pretrained(tmp_path / "two")


@pytest.mark.parametrize("squeezed", ["llama"], indirect=True)
def test_a_trainer_hears_it_at_its_first_checkpoint(squeezed, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    name, _, small = squeezed
    rows = [{"input_ids": row, "labels": row} for row in stored.inputs(name)]
    options = {"max_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    model = copy.deepcopy(small)
    with pytest.raises(sr.StoreError, match="save_strategy='no'"):
        Trainer(model, TrainingArguments(str(tmp_path), **options, save_steps=1), train_dataset=rows).train()
    Trainer(model, TrainingArguments(str(tmp_path), **options, save_strategy="no"), train_dataset=rows).train()
