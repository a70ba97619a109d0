"""Initial weights to disk and back, and the Hugging Face export."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from diloco_ds import config
from diloco_ds.errors import UserError
from diloco_ds.model.build import build_config, build_model, travelling_parameters
from diloco_ds.model.export import export
from diloco_ds.model.initial import (
    initial_model,
    load_initial,
    weights_hash,
    write_initial_weights,
)

IDS = torch.arange(40).view(2, 20)
FAMILIES = {
    "gemma4": ("Gemma4TextConfig", {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 4}),
    "gemma4-untied": (
        "Gemma4TextConfig",
        {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "tie_word_embeddings": False},
    ),
    "gemma4-moe": (
        "Gemma4TextConfig",
        {
            "head_dim": 8,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 8,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
}


@pytest.fixture
def tokenizer(tmp_path):
    vocabulary = {f"t{index}": index for index in range(64)}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), unk_token="t0"
    )
    fast.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def small_model(tmp_path, family="gemma4"):
    """A model whose every tensor, buffers too, differs from what its class starts with."""
    name, fields = FAMILIES[family]
    common = "hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1"
    path = tmp_path / "model.yaml"
    path.write_text(f"class: {name}\nfields: {{{common}}}")
    model = build_model(build_config(config.Model(config_file=str(path), overrides=fields), 64), 0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.1 * torch.rand(tensor.shape))
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard_size", ["5GB", "4KB"])
def test_the_export_gives_the_logits_of_the_weights(tmp_path, tokenizer, family, shard_size):
    model = small_model(tmp_path, family)
    write_initial_weights(model, tmp_path / "init")
    trained = {name: parameter.detach() + 0.05 for name, parameter in travelling_parameters(model).items()}
    save_file(trained, tmp_path / "theta.safetensors")
    model.load_state_dict(trained, strict=False)
    export(
        tmp_path / "theta.safetensors", tmp_path / "init", tokenizer, tmp_path / "hf", shard_size=shard_size
    )
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert len(list((tmp_path / "hf").glob("model*.safetensors"))) == 1 or shard_size == "4KB"
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").convert_tokens_to_ids("t7") == 7


def test_the_export_in_bf16_is_the_rounded_model(tmp_path, tokenizer):
    model = small_model(tmp_path)
    write_initial_weights(model, tmp_path / "init")
    export(
        tmp_path / "init/model.safetensors", tmp_path / "init", tokenizer, tmp_path / "hf", dtype="bfloat16"
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == torch.bfloat16
    expected = travelling_parameters(model)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name].bfloat16()), name


def test_an_existing_directory_other_tensors_and_a_wrong_dtype_are_refused(tmp_path, tokenizer):
    model = small_model(tmp_path)
    write_initial_weights(model, tmp_path / "init")
    weights = tmp_path / "init/model.safetensors"
    with pytest.raises(UserError, match="exists already"):
        export(weights, tmp_path / "init", tokenizer, tokenizer)
    with pytest.raises(UserError, match="choose one of float32"):
        export(weights, tmp_path / "init", tokenizer, tmp_path / "hf", dtype="int4")
    others = load_file(weights)
    others.pop("model.norm.weight")
    save_file(others, tmp_path / "others.safetensors")
    with pytest.raises(UserError, match=r"other tensors than the model: model\.norm\.weight"):
        export(tmp_path / "others.safetensors", tmp_path / "init", tokenizer, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "init",
        "model.yaml",
        "others.safetensors",
        "tokenizer",
    ]


def test_initial_weights_come_back_whole_with_frozen_tensors_and_buffers(tmp_path):
    model = small_model(tmp_path)
    model.model.norm.weight.requires_grad_(False)
    digest = write_initial_weights(model, tmp_path / "init")
    assert digest == weights_hash(tmp_path / "init") == write_initial_weights(model, tmp_path / "again")
    assert "model.norm.weight" not in load_file(tmp_path / "init/model.safetensors")
    loaded = load_initial(tmp_path / "init")
    assert loaded.training
    assert {name for name, p in loaded.named_parameters() if not p.requires_grad} == {"model.norm.weight"}
    assert torch.equal(loaded.eval()(IDS).logits, model(IDS).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_weights_of_another_model_are_refused(tmp_path):
    model = small_model(tmp_path)
    write_initial_weights(model, tmp_path / "init")
    save_file({"model.norm.weight": torch.ones(16)}, tmp_path / "part.safetensors")
    with pytest.raises(UserError, match=r"part\.safetensors lacks weights of the model: .* more"):
        load_initial(tmp_path / "init", tmp_path / "part.safetensors")


def test_a_run_starts_from_a_checkpoint_exactly(tmp_path, tokenizer):
    model = small_model(tmp_path, "gemma4-moe")
    write_initial_weights(model, tmp_path / "init")
    export(tmp_path / "init/model.safetensors", tmp_path / "init", tokenizer, tmp_path / "hf")
    described = config.Model(checkpoint=str(tmp_path / "hf"))
    started = initial_model(described, build_config(described, 64), 0, tmp_path / "scratch")
    assert all(parameter.is_meta for parameter in started.parameters())  # the weights are not in memory
    write_initial_weights(started, tmp_path / "again")
    assert torch.equal(load_initial(tmp_path / "again").eval()(IDS).logits, model(IDS).logits)
    export(tmp_path / "again/model.safetensors", tmp_path / "again", tokenizer, tmp_path / "hf2")
    for file in sorted((tmp_path / "hf").iterdir()):
        assert (tmp_path / "hf2" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_checkpoints_as_transformers_writes_them_are_read(tmp_path, family):
    model = small_model(tmp_path, family)
    model.save_pretrained(tmp_path / "hf", max_shard_size="4KB")
    described = config.Model(checkpoint=str(tmp_path / "hf"))
    started = initial_model(described, build_config(described, 64), 0, tmp_path / "scratch")
    assert list(travelling_parameters(started)) == list(travelling_parameters(model))
    write_initial_weights(started, tmp_path / "init")
    assert torch.equal(load_initial(tmp_path / "init").eval()(IDS).logits, model(IDS).logits)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    small_model(tmp_path).save_pretrained(tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    described = config.Model(checkpoint=str(tmp_path / "hf"))
    with pytest.raises(UserError, match=r"hf' lacks weights of the model: model\.norm\.weight"):
        initial_model(described, build_config(described, 64), 0, tmp_path / "scratch")


def test_a_padded_vocabulary_survives(tmp_path, tokenizer):
    model = small_model(tmp_path)  # 64 entries, the tokenizer of this run has 60
    model.save_pretrained(tmp_path / "hf")
    described = config.Model(checkpoint=str(tmp_path / "hf"))
    started = initial_model(described, build_config(described, 60), 0, tmp_path / "scratch")
    write_initial_weights(started, tmp_path / "init")
    export(tmp_path / "init/model.safetensors", tmp_path / "init", tokenizer, tmp_path / "again")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert loaded.get_input_embeddings().num_embeddings == 64
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_a_random_start_depends_on_the_seed_alone(tmp_path):
    small_model(tmp_path)
    fields = FAMILIES["gemma4"][1]
    described = config.Model(config_file=str(tmp_path / "model.yaml"), overrides=fields)
    hf_config = build_config(described, 64)
    hashes = [
        write_initial_weights(
            initial_model(described, hf_config, seed, tmp_path / "scratch"), tmp_path / f"init{index}"
        )
        for index, seed in enumerate((3, 3, 4))
    ]
    assert hashes[0] == hashes[1] != hashes[2]
