"""Models from files and checkpoints, what of them travels, and how large the configured sizes are."""

import re
from pathlib import Path

import pytest
import torch

from diloco_ds import config
from diloco_ds.errors import UserError
from diloco_ds.model.build import build_config, build_model, count_parameters, meta_model, tensor_specs

CONFIGS = Path(__file__).parents[2] / "model_configs"
SMALL = """
class: Gemma4TextConfig
fields: {hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2,
num_key_value_heads: 1,
         head_dim: 8, global_head_dim: 8, hidden_size_per_layer_input: 0}
"""


def model_file(tmp_path, text=SMALL, **overrides):
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return config.Model(config_file=str(path), overrides=overrides)


def shipped(name, vocab_size):
    return build_config(config.Model(config_file=str(CONFIGS / f"{name}.yaml")), vocab_size)


@pytest.mark.parametrize(("name", "total"), [("gemma4-2b", 2e9), ("gemma4-5b", 5e9), ("gemma4-9b", 9e9)])
def test_dense_sizes_have_the_parameters_of_their_name(name, total):
    assert count_parameters(shipped(name, 262144)).total == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize(("name", "active"), [("gemma4-moe-a2.8b", 2.8e9), ("gemma4-moe-a3.8b", 3.8e9)])
def test_expert_sizes_activate_the_parameters_of_their_name(name, active):
    count = count_parameters(shipped(name, 262144))
    assert count.active == pytest.approx(active, rel=0.02)
    assert count.total > 6 * count.active


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_comment_of_every_size_states_its_counts(path):
    stated = {
        what: float(number) * {"M": 1e6, "B": 1e9}[unit]
        for number, unit, what in re.findall(r"([\d.]+)([MB]) (parameters|of them active)", path.read_text())
    }
    count = count_parameters(shipped(path.stem, 262144 if "vocab_size" in path.read_text() else 4096))
    assert count.total == pytest.approx(stated["parameters"], rel=0.005)
    assert count.active == pytest.approx(stated.get("of them active", count.total), rel=0.005)


def test_counts_equal_a_built_model_with_the_active_ones_by_hand():
    count = count_parameters(shipped("gemma4-tiny-moe", 300))
    built = build_model(shipped("gemma4-tiny-moe", 300), 0)
    assert count.total == sum(parameter.numel() for parameter in built.parameters())
    assert count.embedding == 300 * 128
    idle_experts = 4 * (8 - 2) * 3 * 128 * 128  # layers x experts not chosen x (gate, up, down)
    assert count.active == count.total - idle_experts


def test_same_seed_same_weights_and_the_global_random_state_is_left_alone():
    hf_config = shipped("gemma4-tiny", 300)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (build_model(hf_config, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}


def test_specs_list_trainable_tensors_once_in_order_with_the_embedding_flagged(tmp_path):
    model = build_model(build_config(model_file(tmp_path), 300), 0)
    model.model.norm.weight.requires_grad_(False)
    specs = tensor_specs(model)
    names = [spec.name for spec in specs]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names  # tied to the embedding
    assert "model.norm.weight" not in names  # frozen
    assert not [name for name in names if "layer_scalar" in name]  # a buffer
    assert [spec.name for spec in specs if spec.embedding] == ["model.embed_tokens.weight"]
    assert specs[0].shape == (300, 16)
    assert [spec.name for spec in tensor_specs(meta_model(model.config)) if spec.name in names] == names


def test_untied_output_embedding_travels_on_its_own(tmp_path):
    model = meta_model(build_config(model_file(tmp_path, tie_word_embeddings=False), 300))
    flags = {spec.name: spec.embedding for spec in tensor_specs(model)}
    assert flags["lm_head.weight"] is False
    assert flags["model.embed_tokens.weight"] is True


def test_vocabulary_and_special_tokens_are_the_tokenizers(tmp_path):
    hf_config = build_config(model_file(tmp_path), 300, {"bos_token_id": 7, "eos_token_id": 8})
    assert (hf_config.vocab_size, hf_config.bos_token_id, hf_config.eos_token_id) == (300, 7, 8)
    assert hf_config.pad_token_id is None


def test_a_vocabulary_padded_to_a_round_number_is_accepted_and_others_are_refused(tmp_path):
    assert build_config(model_file(tmp_path, vocab_size=512), 300).vocab_size == 512
    for own in (299, 4096):
        with pytest.raises(UserError, match=f"model's vocabulary has {own} entries, the tokenizer's 300"):
            build_config(model_file(tmp_path, vocab_size=own), 300)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class: Gemma4TextConfi\nfields: {}", "did you mean 'Gemma4TextConfig'"),
        ("class: CLIPVisionConfig\nfields: {}", "CLIPVisionConfig makes no causal language model"),
        (
            "class: Gemma4TextConfig\nfields: {hiden_size: 3}",
            "no field 'hiden_size'; did you mean 'hidden_size'",
        ),
        (
            "class: Gemma4TextConfig\nfields: {hidden_size: wide}",
            "Gemma4TextConfig refuses these fields.*hidden_size",
        ),
        ("class: Gemma4TextConfig", "two keys: class"),
        ("class: [", "not valid YAML"),
    ],
)
def test_a_bad_model_file_gives_one_line_with_the_file_and_the_remedy(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as caught:
        build_config(model_file(tmp_path, text), 300)
    assert "model.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_an_unknown_override_and_no_checkpoint_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*nowhere\.yaml"):
        build_config(config.Model(config_file=str(tmp_path / "nowhere.yaml")), 300)
    with pytest.raises(UserError, match="no field 'layers'"):
        build_config(model_file(tmp_path, layers=3), 300)
    with pytest.raises(UserError, match="cannot be read as a Hugging Face checkpoint"):
        build_config(config.Model(checkpoint=str(tmp_path)), 300)
