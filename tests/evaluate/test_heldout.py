import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import MODEL
from transformers import AutoModelForCausalLM, Gemma4TextConfig, PreTrainedModel

from diloco_ds.data.blocks import HeldOut
from diloco_ds.data.pack import Packer
from diloco_ds.data.tokenizer import train_tokenizer
from diloco_ds.evaluate.heldout import evaluated_blocks, evaluating, heldout_loss

TEXTS = [f"document {i}: naïve café, {i * 37} €" for i in range(40)]


@pytest.fixture(scope="module")
def heldout(tmp_path_factory) -> HeldOut:
    directory = tmp_path_factory.mktemp("heldout")
    packer = Packer(train_tokenizer(TEXTS, 280), 16, directory / "b.npy", directory / "bytes.npy")
    packer.add(TEXTS)
    packer.close()
    return HeldOut.open(directory / "b.npy", directory / "bytes.npy")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    config = Gemma4TextConfig(
        **MODEL["fields"], vocab_size=280, vocab_size_per_layer_input=280, final_logit_softcapping=5.0
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_the_loss_is_the_models_own_over_all_blocks(model, heldout):
    result = heldout_loss(model, heldout, batch_size=7, max_tokens=10**9, device="cpu")
    ids = heldout.blocks.batch(range(len(heldout)))
    with torch.no_grad():
        own = torch.stack([model(input_ids=row[None], labels=row[None]).loss for row in ids]).double()
    assert result["loss"] == pytest.approx(own.mean().item(), rel=1e-5)
    assert result["stderr"] == pytest.approx(own.std().item() / math.sqrt(len(own)), rel=1e-4)
    assert result["tokens"] == 15 * len(heldout)
    # All text that made it into a block, since every block's first token is BOS.
    text = "".join(TEXTS).encode()
    assert len(text) - 60 < result["bytes"] <= len(text)
    assert result["bits_per_byte"] == pytest.approx(
        result["loss"] * result["tokens"] / (math.log(2) * result["bytes"]), rel=1e-9
    )


def test_a_uniform_model_has_the_loss_of_its_vocabulary(model, heldout):
    with torch.no_grad():
        uniform = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        uniform.get_input_embeddings().weight.zero_()  # tied: all logits are zero
    result = heldout_loss(uniform, heldout, batch_size=4, max_tokens=64, device="cpu")
    assert result["loss"] == pytest.approx(math.log(280), rel=1e-6)
    assert result["blocks"] == 4


def test_always_the_same_blocks_and_independent_of_the_batch_size(model, heldout):
    one, two = (heldout_loss(model, heldout, size, 200, "cpu") for size in (1, 5))
    assert one["blocks"] == 12
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)
    assert one == heldout_loss(model, heldout, 1, 200, "cpu")
    assert heldout_loss(model, heldout, 1, 3, "cpu")["stderr"] is None  # one block has no standard error


@given(blocks=st.integers(1, 500), length=st.integers(8, 64), max_tokens=st.integers(1, 40_000))
def test_blocks_are_spread_within_the_limit(blocks, length, max_tokens):
    chosen = evaluated_blocks(blocks, length, max_tokens)
    assert len(chosen) == len(set(chosen)) == min(blocks, max(1, max_tokens // length))
    assert all(0 <= block < blocks for block in chosen)
    gaps = {b - a for a, b in itertools.pairwise(chosen)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_modes_are_restored_module_by_module(model):
    model.train()
    model.base_model.layers[0].eval()
    before = [module.training for module in model.modules()]

    def fail() -> None:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()
