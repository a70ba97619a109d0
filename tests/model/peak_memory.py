"""What test_memory.py measures, each in a process of its own: argv is WORK DIRECTORY. Prints the most anonymous
memory (what the system cannot drop, unlike pages of files) that the work took above what was there before, in bytes.
"""

import re
import sys
import threading
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from diloco_ds import config
from diloco_ds.model.build import build_config
from diloco_ds.model.export import export
from diloco_ds.model.initial import empty_model, initial_model, write_initial_weights

CONFIG = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
}


def anonymous():
    """Bytes of anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])


def peak_of(work):
    """The most that was there while `work` ran, above what was there before."""
    before = most = anonymous()
    over = threading.Event()

    def watch():
        nonlocal most
        while not over.wait(0.002):
            most = max(most, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    work()
    over.set()
    thread.join()
    return max(most, anonymous()) - before


def whole(directory):
    """For comparison: the model, as transformers makes it."""
    model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**CONFIG), dtype=torch.float32)
    if not (directory / "hf").exists():
        model.save_pretrained(directory / "hf", max_shard_size="50MB")
    return model


def start(directory):
    """A run starts from the checkpoint."""
    described = config.Model(checkpoint=str(directory / "hf"))
    model = initial_model(described, build_config(described, 1024), 0, directory / "scratch")
    write_initial_weights(model, directory / "init")


def empty(directory):
    """A rank makes the model that it reads its part into."""
    return empty_model(directory / "init")


def export_weights(directory):
    """The global weights become a checkpoint."""
    (directory / "tokenizer").mkdir()
    export(
        directory / "init/model.safetensors",
        directory / "init",
        directory / "tokenizer",
        directory / "exported",
        shard_size="50MB",
    )


WORKS = {"whole": whole, "start": start, "empty": empty, "export": export_weights}

if __name__ == "__main__":
    work, target = WORKS[sys.argv[1]], Path(sys.argv[2])
    kept = []
    print(peak_of(lambda: kept.append(work(target))))
