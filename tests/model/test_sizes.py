"""`diloco-ds models`: counts beside formulas written out by hand, and the DeepSeek-V3-like model trains."""

import json

import pytest
import torch

from diloco_ds.cli import main
from diloco_ds.model.build import build_model, config_from_file, travelling_parameters
from diloco_ds.model.initial import fixed_tensors
from diloco_ds.model.loss import LossModel, check_loss
from diloco_ds.model.sizes import SHIPPED, model_sizes

VOCABULARY = 1000


def gemma4_tiny():
    width, heads, kv_heads, head = 192, 4, 2, 48
    attention = width * head * (2 * heads + 2 * kv_heads) + 2 * head  # q and o, k and v; norms of q and k
    layer = attention + 3 * width * 768 + 4 * width
    total = VOCABULARY * width + 4 * layer + width  # tied
    return total, total


def qwen3_moe_tiny():
    width, head = 128, 32
    attention = width * head * (2 * 4 + 2 * 2) + 2 * head
    expert = 3 * width * 128
    layer = attention + 8 * expert + 8 * width + 2 * width  # experts, router, norms
    total = VOCABULARY * width + 4 * layer + width  # tied
    return total, total - 4 * (8 - 2) * expert


def deepseek_v3_tiny():
    width, heads, latent, nope, rope, value = 128, 4, 64, 32, 16, 32
    queries = width * latent + latent + latent * heads * (nope + rope)
    keys_and_values = width * (latent + rope) + latent + latent * heads * (nope + value)
    attention = queries + keys_and_values + heads * value * width
    expert = 3 * width * 128
    sparse = 8 * expert + expert + 8 * width  # routed, shared, router
    total = 4 * (attention + 2 * width) + 3 * width * 256 + 3 * sparse + 2 * VOCABULARY * width + width
    return total, total - 3 * (8 - 2) * expert


@pytest.mark.parametrize("by_hand", [gemma4_tiny, qwen3_moe_tiny, deepseek_v3_tiny])
def test_counts_are_those_of_a_formula_written_by_hand(by_hand, capsys):
    name = by_hand.__name__.replace("_", "-")
    assert main(["models", name, "--vocab", str(VOCABULARY), "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert (model["total"], model["active"]) == by_hand()
    assert model["embedding"] == VOCABULARY * model["width"]


def test_every_shipped_model_is_counted_at_its_own_vocabulary_or_the_given_one(capsys):
    assert main(["models", "--vocab", str(VOCABULARY), "--json"]) == 0
    models = {model["name"]: model for model in json.loads(capsys.readouterr().out)["models"]}
    assert set(models) == {path.stem for path in SHIPPED.glob("*.yaml")}
    for name, model in models.items():
        assert model["vocabulary"] == (VOCABULARY if "tiny" in name else 262144)
        assert (model["active"] < model["total"]) == (model["experts"] > 0)
    assert (models["gemma4-moe-a3.8b"]["chosen"], models["gemma4-moe-a3.8b"]["experts"]) == (8, 128)


def test_a_file_and_a_checkpoint_directory_are_counted_alike(tmp_path):
    config_from_file(str(SHIPPED / "mixtral-tiny.yaml"), {}, VOCABULARY, {}).save_pretrained(tmp_path)
    shipped, file, directory = model_sizes(
        ["mixtral-tiny", str(SHIPPED / "mixtral-tiny.yaml"), str(tmp_path)], VOCABULARY
    )
    assert shipped == file
    assert (directory.total, directory.active, directory.vocabulary) == (file.total, file.active, VOCABULARY)


def test_an_unknown_name_and_a_broken_directory_are_one_line(tmp_path, capsys):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, says in (
        ("gemma5", "none of deepseek-v3-tiny, "),
        (str(tmp_path), "cannot be read"),
        (str(tmp_path / "binary.yaml"), "not valid YAML"),
    ):
        assert main(["models", name]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1


def test_the_deepseek_like_model_trains_with_its_router_and_leaves_the_correction_bias_alone():
    hf_config = config_from_file(str(SHIPPED / "deepseek-v3-tiny.yaml"), {}, 101, {})
    model = build_model(hf_config, 1)
    check_loss(model)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert bias in fixed_tensors(model)
    router = travelling_parameters(model)["model.layers.1.mlp.gate.weight"]
    loss_model, before = LossModel(model.train(), chunk=16), router.detach().clone()
    optimizer = torch.optim.AdamW(loss_model.parameters(), lr=3e-3)
    ids = torch.arange(2 * 32).remainder(101).view(2, 32)
    losses = []
    for _ in range(6):
        losses.append(loss_model(ids))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.5
    assert not torch.equal(router, before)
    assert not fixed_tensors(model)[bias].any()
