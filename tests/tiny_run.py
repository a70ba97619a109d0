"""The smallest whole run, for tests: generated text, a Gemma 4 model of 30,000 parameters, two islands.


    config = tiny_config(tmp_path)  # a RunConfig
    config = tiny_config(tmp_path, precision="fp32", zero_stage=3, budget={"tokens": 10_000})
    run_file = tiny_run_file(tmp_path, exchange={"quorum": 2})  # the same as a YAML file

Keyword arguments beyond the named ones are blocks of the run file, merged over the defaults key by key.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from diloco_ds.config import RunConfig

MODEL = {
    "class": "Gemma4TextConfig",
    "fields": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "max_position_embeddings": 256,
    },
}

_SUBJECTS = {
    False: [
        "the farmer",
        "a child",
        "the old ship",
        "this river",
        "the captain",
        "my neighbour",
        "an owl",
        "the king",
    ],
    True: [
        "the farmers",
        "two children",
        "these ships",
        "the rivers",
        "many people",
        "the birds",
        "all kings",
        "they",
    ],
}
_VERBS = {False: ["is", "was", "has been"], True: ["are", "were", "have been"]}
_STATES = [
    "near the harbour",
    "in the field",
    "quiet",
    "ready to leave",
    "far from home",
    "at the market",
    "tired",
    "here",
]
_TIMES = [
    "today",
    "in the morning",
    "after the war",
    "every winter",
    "when it rains",
    "at night",
    "as before",
]


def tiny_text(documents: int = 240, sentences: int = 12, seed: int = 7) -> list[str]:
    """Documents of simple English sentences (number agreement included), the same for the same `seed`."""
    choose = random.Random(seed)
    return [" ".join(_sentence(choose) for _ in range(sentences)) for _ in range(documents)]


def _sentence(choose: random.Random) -> str:
    plural = choose.random() < 0.5
    words = [
        choose.choice(_SUBJECTS[plural]),
        choose.choice(_VERBS[plural]),
        choose.choice(_STATES),
        choose.choice(_TIMES),
    ]
    text = " ".join(words)
    return text[0].upper() + text[1:] + "."


def tiny_run(
    directory: Path,
    *,
    precision: str = "bf16",
    zero_stage: int = 1,
    islands: int | list[dict[str, Any]] = 2,
    ranks: int = 1,
    **blocks: Any,
) -> dict[str, Any]:
    """The run file as a dict; writes text.jsonl and model.yaml. `precision`: bf16, fp16 or fp32.

    `islands`: how many, with `ranks` each, or their blocks.
    """
    if isinstance(islands, int):
        islands = [{"name": "abcdefgh"[i], "ranks": ranks} for i in range(islands)]
    directory.mkdir(parents=True, exist_ok=True)
    text = directory / "text.jsonl"
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in tiny_text()))
    model = directory / "model.yaml"
    model.write_text(yaml.safe_dump(MODEL, sort_keys=False))
    defaults = {
        "name": "tiny",
        "seed": 1,
        "budget": {"tokens": 16_384},
        "model": {"config_file": str(model)},
        "tokenizer": {"train_vocab": 320},
        "data": {
            "sources": [{"files": str(text), "format": "json", "heldout_every": 10}],
            "sequence_length": 64,
            "cache_dir": str(directory / "cache"),
            "prepare_workers": 1,
        },
        "islands": [{"threads_per_rank": 1, **island} for island in islands],
        "deepspeed": deepspeed_config(precision, zero_stage),
        "exchange": {"fragments": 4, "period": 4, "overlap": 1},
        "syncer": {"checkpoint_every_s": 2.0},
        "trainer": {"warmup_tokens": 1024, "checkpoint_every_s": 5.0},
        "evaluation": {"heldout_tokens": 2048},
        "observe": {"wandb": {"mode": "disabled"}},
    }
    return _merged(defaults, blocks)


def tiny_config(directory: Path, **settings: Any) -> RunConfig:
    """`tiny_run` validated."""
    return RunConfig.model_validate(tiny_run(directory, **settings))


def tiny_run_file(directory: Path, **settings: Any) -> Path:
    """`tiny_run` as directory/run.yaml."""
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(tiny_run(directory, **settings), sort_keys=False))
    return path


def deepspeed_config(precision: str = "bf16", zero_stage: int = 1) -> dict[str, Any]:
    """A DeepSpeed config with torch's AdamW (nothing to compile)."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": zero_stage},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return config


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
