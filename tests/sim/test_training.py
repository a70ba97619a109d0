"""Real tiny models in virtual time: what the merging does to them, and that they learn."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import nn

from diloco_ds import config
from diloco_ds.cli import main
from diloco_ds.config import Exchange
from diloco_ds.core.events import Answer, Keep, Merge, Part
from diloco_ds.core.fragments import TensorSpec, balance
from diloco_ds.sim.real_weights import Learner, RealWeights
from diloco_ds.sim.study import cases, groups
from diloco_ds.sim.tiny_model import LENGTH, Text, TinyModel
from diloco_ds.sim.training import Curve, Training, train

SMALL = Exchange(fragments=4, period=4, overlap=1)


@pytest.fixture(scope="module")
def words():
    choose = random.Random(0)
    return " ".join(choose.choice(["tide", "harbour", "captain", "ships", "the", "and"]) for _ in range(4000))


@pytest.fixture(scope="module")
def text(words):
    return Text(words.encode())


@pytest.mark.parametrize("experts", [0, 8])
def test_the_model_is_causal_and_travels_whole(experts):
    model = TinyModel(0, experts)
    specs = model.specs()
    assert sum(spec.numel for spec in specs) == sum(p.numel() for p in model.parameters())
    assert 80_000 < sum(spec.numel for spec in specs) < 300_000
    assert [spec.expert_layer for spec in specs if spec.experts] == ([0, 0, 1, 1] if experts else [])
    rows = torch.randint(0, 256, (1, LENGTH + 1))
    changed = rows.clone()
    changed[0, LENGTH // 2 :] = 0
    outputs = [model.hidden(r[:, :-1]) for r in (rows, changed)]
    torch.testing.assert_close(outputs[0][:, : LENGTH // 2], outputs[1][:, : LENGTH // 2])


def test_the_heldout_text_is_never_trained_on():
    text = Text(bytes(range(100)) * 90 + b"\xff" * 1000)
    assert (text.heldout() == 255).all()
    generator = torch.Generator().manual_seed(0)
    for shard in range(4):
        assert (text.batch(shard, 4, 64, generator) < 100).all()


def test_of_several_kinds_of_text_learners_have_them_in_their_order():
    text = Text(b"a" * 9_000, b"b" * 10_000)
    generator = torch.Generator().manual_seed(0)
    kinds = [set(text.batch(shard, 4, 64, generator).flatten().tolist()) for shard in range(4)]
    assert kinds == [{ord("a")}, {ord("a")}, {ord("b")}, {ord("b")}]
    assert set(text.heldout().flatten().tolist()) == {ord("a"), ord("b")}


def learner(value):
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return Learner(model, lambda: None)


def hand_driven(**settings):
    """Two learners of one weight vector at 1; the outer optimizer is plain SGD with lr 1, the merge the mean."""
    exchange = Exchange(
        fragments=1,
        period=1,
        overlap=0,
        outer={"args": {"lr": 1.0}},
        **{"merge": {"matrices": "mean"}, **settings},
    )
    learners = {"a": learner(1.0), "b": learner(1.0)}
    layout = balance([TensorSpec("weight", (1, 2), False)], 1, 1)
    weights = RealWeights(layout, exchange, learners, lambda: None)
    for name in learners:
        weights.adopt(name, 0, 0)
    return weights, {name: each.model.weight for name, each in learners.items()}


def answer(weights, island, update_id, base=0):
    weights.snapshot(island, 0)
    weights.sent(Answer(island, 1, 0, 1, base, 1, 10, update_id))


def merge(version, *parts):
    shares = tuple(Part(name, uid, base, 1, 10, 1 / len(parts), False) for name, uid, base in parts)
    return Merge(0, version, version, shares, 0, (), 0.0, "")


def global_weight(weights):
    model = nn.Linear(2, 1, bias=False)
    weights.write_global(model)
    return model.weight[0].tolist()


def test_the_mean_of_two_learners_becomes_the_global_weights():
    weights, models = hand_driven()
    models["a"].data[:] = 0.0
    models["b"].data[:] = 4.0
    answer(weights, "a", 1)
    answer(weights, "b", 2)
    weights.merge(merge(1, ("a", 1, 0), ("b", 2, 0)))
    assert global_weight(weights) == [2.0, 2.0]
    weights.adopt("a", 0, 1)
    assert models["a"].tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize(("anchor", "expected"), [("base", 3.0), ("global", 4.0)])
def test_a_late_answer_is_measured_from_its_base_or_from_the_fragment_at_the_merge(anchor, expected):
    weights, models = hand_driven(merge={"matrices": "mean", "anchor": anchor})
    models["a"].data[:] = 0.0
    models["b"].data[:] = 4.0
    answer(weights, "a", 1)
    answer(weights, "b", 2)
    weights.merge(merge(1, ("a", 1, 0)))  # global: 0
    weights.keep(Keep("b", 0, 2, 0, ""))
    weights.merge(merge(2, ("b", 2, 0)))  # b went from 1 to 4: +3 on 0; or all the way to b's 4
    assert global_weight(weights) == [expected, expected]


def test_a_fragment_answered_and_adopted_at_one_boundary_is_sent_as_it_was_before():
    weights, models = hand_driven()
    answer(weights, "a", 1)
    weights.merge(merge(1, ("a", 1, 0)))
    models["b"].data[:] = 7.0
    weights.snapshot("b", 0)
    weights.adopt("b", 0, 1)
    weights.sent(Answer("b", 1, 0, 1, 0, 1, 10, 2))
    weights.keep(Keep("b", 0, 2, 0, ""))
    weights.merge(merge(2, ("b", 2, 0)))
    assert global_weight(weights) == [7.0, 7.0]


@pytest.mark.parametrize(("how", "expected"), [("overwrite", 2.0), ("mix", 3.5), ("rebase", 3.0)])
def test_adoption(how, expected):
    weights, models = hand_driven(adoption={"how": how, "alpha": 0.5})
    models["a"].data[:] = 4.0
    answer(weights, "a", 1)
    models["b"].data[:] = 0.0
    answer(weights, "b", 2)
    weights.merge(merge(1, ("a", 1, 0), ("b", 2, 0)))  # global: 2
    models["a"].data[:] = 5.0  # one more step of +1 while the fragment was away
    weights.adopt("a", 0, 1)
    assert models["a"].tolist() == [[expected, expected]]


MIXTURE = SMALL.model_copy(update={"merge": config.Merge(weights="expert_tokens")})


@pytest.mark.parametrize(
    "settings",
    [{"data_parallel": True}, {"learners": 2}, {"learners": 2, "experts": 4, "exchange": MIXTURE}],
)
def test_it_learns_and_is_deterministic(text, settings):
    run = Training(text, steps=24, **{"exchange": SMALL, **settings})
    curve = train(run)
    assert len(curve.expert_load) == (2 if "experts" in settings else 0)
    assert all(1 <= load <= 4 / 2 for load in curve.expert_load)
    assert curve.apart is None or 0 < curve.apart < 1
    assert curve.loss < 4.0 < curve.points[0][1]
    assert train(run).points == curve.points


def test_one_learner_that_is_copied_back_is_nearly_data_parallel(text):
    """M = 1 with an outer step of 1 and no momentum: the global weights are the learner's own."""
    plain = {"outer": {"args": {"lr": 1.0}}, "adoption": {"how": "rebase"}}
    exchange = Exchange(fragments=4, period=4, overlap=1, **plain)
    one = train(Training(text, learners=1, steps=24, exchange=exchange))
    together = train(Training(text, steps=24, data_parallel=True))
    assert one.loss == pytest.approx(together.loss, abs=0.15)


def test_the_study_has_every_question_of_the_frame():
    assert groups() == [
        "baseline",
        "merge",
        "adoption",
        "anchor",
        "late",
        "quorum",
        "outer",
        "period",
        "experts",
    ]
    names = [case.name for case in cases() if case.group == "merge"]
    assert names == [f"M = {m}, {rule}" for m in (2, 4, 8, 16) for rule in ("rda", "mean")]
    for case in cases():
        Exchange.model_validate(case.exchange)


def test_the_command_line(words, tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text(words)
    quick = ["--text", str(path), "--steps", "8", "--json"]
    exchange = ["--fragments", "4", "--period", "4", "--overlap", "1"]
    assert main(["simulate", "train", "--learners", "2", *exchange, *quick]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["loss"] == value["curve"][-1]["loss"]
    study = ["simulate", "study", "--groups", "baseline", "--seeds", "2", "--out", str(tmp_path / "out")]
    assert main([*study, *quick]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["mean"] == pytest.approx(sum(case["losses"]) / 2)
    assert case["spread"] > 0
    assert case["end_mean"] == pytest.approx(case["mean"])  # data parallel trains the budget and no more


def test_losses_are_compared_at_equal_trained_tokens():
    curve = Curve("", [(0, 5.0), (100, 4.0), (200, 2.0)], merges=2, dropped=0)
    assert [curve.at(tokens) for tokens in (0, 50, 100, 150, 200)] == [5.0, 4.5, 4.0, 3.0, 2.0]
    assert (curve.loss, curve.tokens) == (2.0, 200)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--learners", "0"], "--learners: must be a whole number of 1 or more"),
        (["train", "--learners", "3"], "a batch of 16 examples cannot be shared by 3 learners"),
        (["train", "--learners", "2", "--quorum", "3"], "quorum (K = 3) must not exceed"),
        (["train", "--experts", "1"], "experts must be 0 (a dense model), or 2 to 64, not 1"),
        (["train", "--weights", "expert_tokens"], "a dense model has no experts"),
        (["study", "--groups", "nonsense"], "no group 'nonsense'"),
        (["study", "--seeds", "0"], "--seeds: must be a whole number of 1 or more"),
    ],
)
def test_bad_input_is_one_line(words, tmp_path, capsys, arguments, message):
    path = tmp_path / "text.txt"
    path.write_text(words)
    assert main(["simulate", *arguments, "--text", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_text_that_is_not_there_or_too_short(tmp_path, capsys):
    assert main(["simulate", "train", "--text", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    for text in ("short", ""):
        (tmp_path / "short").write_text(text)
        assert main(["simulate", "train", "--text", str(tmp_path / "short")]) == 2
        assert f"a text of {len(text)} bytes is too short" in capsys.readouterr().err
