import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from diloco_ds.data.blocks import BlockFile, BlockWriter, HeldOut
from diloco_ds.data.pack import Packer, batches, token_bytes, token_dtype
from diloco_ds.data.tokenizer import BOS, train_tokenizer

BOS_ID, EOS_ID = 2, 1
TEXTS = ["ab", "", "abcdefghij", "é€😀 and more text", "x" * 40, "the end"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, 259)  # no merges: a token a byte


@pytest.fixture(scope="module")
def without_bos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same tokenizer, but it puts no BOS before a text."""
    other = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>", bos_token=BOS
    )
    other.backend_tokenizer.post_processor = None
    return other


def pack(tokenizer, texts, length, directory, chunks=1):
    packer = Packer(tokenizer, length, directory / "b.npy", directory / "bytes.npy")
    for i in range(chunks):
        packer.add(
            texts[i::chunks]
            if chunks == 1
            else texts[i * len(texts) // chunks : (i + 1) * len(texts) // chunks]
        )
    return packer.close(), HeldOut.open(directory / "b.npy", directory / "bytes.npy")


def test_blocks_by_hand(tokenizer, tmp_path):
    a, b, c, d = tokenizer("abcd", add_special_tokens=False)["input_ids"]
    counts, packed = pack(tokenizer, ["abc", "d", "abcd"], 4, tmp_path)
    # Stream: B a b c E | B d E | B a b c d E. Every block begins with B; where the stream has none there, it is put.
    assert packed.blocks.batch(range(len(packed))).tolist() == [
        [BOS_ID, a, b, c],
        [BOS_ID, EOS_ID, BOS_ID, d],
        [BOS_ID, EOS_ID, BOS_ID, a],
        [BOS_ID, b, c, d],
    ]
    assert packed.token_bytes.batch(range(4)).tolist() == [
        [0, 1, 1, 1],
        [0, 0, 0, 1],
        [0, 0, 0, 1],
        [0, 1, 1, 1],
    ]
    assert (counts.documents, counts.text_bytes, counts.blocks, counts.stream_tokens) == (3, 8, 4, 14)
    assert packed.predicted_bytes([0, 3]) == 6


def test_without_bos_blocks_are_slices_of_the_stream(without_bos, tmp_path):
    _, packed = pack(without_bos, TEXTS, 8, tmp_path)
    stream = [token for text in TEXTS for token in [*without_bos(text)["input_ids"], EOS_ID]]
    whole = len(stream) // 8 * 8
    assert packed.blocks.batch(range(len(packed))).flatten().tolist() == stream[:whole]


@given(
    texts=st.lists(st.text(st.sampled_from("aé€😀 \n"), max_size=30), min_size=1, max_size=12),
    length=st.integers(8, 20),
    chunks=st.integers(1, 4),
)
@settings(max_examples=60)
def test_nothing_is_lost_but_the_end(tokenizer, tmp_path_factory, texts, length, chunks):
    counts, packed = pack(tokenizer, texts, length, tmp_path_factory.mktemp("pack"), chunks)
    rows = (
        packed.blocks.batch(range(len(packed))) if len(packed) else torch.empty(0, length, dtype=torch.long)
    )
    assert all(row[0] == BOS_ID for row in rows)
    text = tokenizer.decode(rows.flatten().tolist(), skip_special_tokens=True)
    assert "".join(texts).encode().startswith(text.rstrip("\ufffd").encode())
    # What is left over is shorter than a block.
    assert (
        counts.text_bytes - int(packed.token_bytes.batch(range(len(packed))).sum() if len(packed) else 0)
        < length
    )


@given(text=st.text(max_size=60))
@settings(max_examples=100)
def test_bytes_of_tokens_add_up_to_the_text(tokenizer, text):
    text = text.encode("utf-8", "ignore").decode()
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert token_bytes(text, offsets).sum() == len(text.encode())


def test_bytes_of_tokens_by_hand():
    # "é" is two bytes in two tokens of the same character; the space between belongs to the second word.
    assert token_bytes("é ab", [(0, 1), (0, 1), (2, 4)]).tolist() == [2, 0, 3]
    assert token_bytes("ab  ", [(0, 2)]).tolist() == [4]
    assert token_bytes("", []).tolist() == []


def test_tokens_are_two_bytes_wide_where_they_fit(tokenizer, tmp_path):
    assert token_dtype(tokenizer) == np.uint16
    pack(tokenizer, TEXTS, 8, tmp_path)
    assert np.load(tmp_path / "b.npy", mmap_mode="r").dtype == np.uint16


def test_wide_tokens_survive(tmp_path):
    rows = np.array([[70_000, 1], [2, 2**31]], np.uint32)
    writer = BlockWriter(tmp_path / "wide.npy", 2, np.uint32)
    writer.write(rows[:1])
    writer.write(rows[1:])
    writer.close()
    assert BlockFile.open(tmp_path / "wide.npy").batch([1, 0]).tolist() == rows[::-1].tolist()


def test_a_batch_is_in_the_order_asked_for(tokenizer, tmp_path):
    _, packed = pack(tokenizer, TEXTS, 8, tmp_path)
    batch = packed.blocks.batch([2, 0, 2])
    assert batch.dtype == torch.int64
    assert batch[1].tolist() == packed.blocks[0].tolist()
    assert batch[0].tolist() == batch[2].tolist() == packed.blocks[2].tolist()
    assert packed.blocks.sequence_length == 8


def test_only_block_files_are_opened(tmp_path):
    np.save(tmp_path / "flat.npy", np.arange(8))
    with pytest.raises(ValueError, match="no blocks"):
        BlockFile.open(tmp_path / "flat.npy")


def test_batches_are_bounded_and_complete():
    items = [600_000, 600_000, 1, 2, 3]
    assert list(batches(items, lambda item: item)) == [[600_000, 600_000], [1, 2, 3]]
