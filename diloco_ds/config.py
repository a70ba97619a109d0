"""The one configuration tree of a run: every setting, its unit and what it means.

A run is described by one YAML file. It is read by `diloco_ds.config_file.load_config`, validated here, and written
back resolved as `config.yaml` into the run directory. Unknown keys are refused. The blocks `deepspeed` and
`trainer.scheduler_args` are passed through untouched: they are DeepSpeed's and transformers' own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Block(BaseModel):
    """A block of settings: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Positive = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]


class Budget(Block):
    """When the run is finished."""

    tokens: Positive = Field(description="Tokens to merge into the global model before the run finishes.")


class Model(Block):
    """The model every island trains: exactly one of `config_file` and `checkpoint`."""

    config_file: str | None = Field(
        None,
        description="YAML file naming a transformers config class and its fields (see model_configs/); "
        "weights start random from `seed`.",
    )
    checkpoint: str | None = Field(
        None, description="Local directory or hub name of a Hugging Face checkpoint to start from."
    )
    overrides: dict[str, Any] = Field({}, description="Fields of the transformers config to replace.")

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.config_file is None) == (self.checkpoint is None):
            raise ValueError("give exactly one of config_file and checkpoint")
        return self


class Tokenizer(Block):
    """The tokenizer: exactly one of `path` (an existing one) and `train_vocab` (train one on the training text)."""

    path: str | None = Field(None, description="Local directory or hub name of a Hugging Face tokenizer.")
    train_vocab: int | None = Field(
        None,
        ge=259,
        description="Train a byte-level BPE with this many entries on the training text, once, cached.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Tokenizer:
        if (self.path is None) == (self.train_vocab is None):
            raise ValueError("give exactly one of path and train_vocab")
        return self


class TextSource(Block):
    """One source of text, read with Hugging Face `datasets`: a hub data set, or local files, also of a package."""

    hub: str | None = Field(None, description="Hub name of a data set, for example HuggingFaceFW/fineweb.")
    hub_config: str | None = Field(None, description="Configuration (subset) of the hub data set.")
    files: str | None = Field(
        None,
        description="Local file, directory or glob; relative to `package` where that is given, else to the run file.",
    )
    package: str | None = Field(
        None, description="Installed Python package that ships the files as data; located, never imported."
    )
    format: Literal["text", "document", "json", "parquet", "arrow"] | None = Field(
        None,
        description="Format of local files: text (a document a line), document (a document a file), json "
        "(json or jsonl), parquet, arrow.",
    )
    split: str = Field("train", description="Split of the hub data set.")
    text_field: str | Annotated[list[str], Field(min_length=1)] = Field(
        "text",
        description="Column that holds the text, or columns to join; a column of lists of strings makes a line of each.",
    )
    heldout_every: int | None = Field(
        None, ge=2, description="Every n-th document (0, n, ...) is held out: evaluated, never trained on."
    )
    heldout_files: str | None = Field(
        None,
        description="Regular expression on the file name (format document): matching files are held out.",
    )

    @model_validator(mode="after")
    def _one_place(self) -> TextSource:
        if (self.hub is None) == (self.files is None):
            raise ValueError("give exactly one of hub and files")
        if self.files is not None and self.format is None:
            raise ValueError("format is needed with files: text, document, json, parquet or arrow")
        if self.package is not None and self.files is None:
            raise ValueError("package needs files: the glob of the data files inside the package")
        if self.heldout_files is not None and self.format != "document":
            raise ValueError("heldout_files is for format: document")
        return self


class Data(Block):
    """Training and held-out text."""

    sources: list[TextSource] = Field(min_length=1, description="Where the text comes from.")
    sequence_length: int = Field(ge=8, description="Tokens a packed block, and so a training example, holds.")
    cache_dir: str = Field(
        ".cache/diloco_ds",
        description="Where prepared blocks and trained tokenizers are kept, by content hash; relative to "
        "the working directory.",
    )
    prepare_workers: Positive = Field(2, description="Threads that tokenize while the data is prepared.")


class Island(Block):
    """One learner: a DeepSpeed job of its own, on one host."""

    name: Name = Field(description="Name of the island, unique in the run.")
    ranks: Positive = Field(1, description="DeepSpeed ranks (one per GPU, or per CPU process).")
    deepspeed: dict[str, Any] = Field(
        {}, description="DeepSpeed settings of this island, merged over the run's `deepspeed`."
    )
    master_port: int | None = Field(
        None, ge=1024, le=65535, description="Rendezvous port; none: a free one at each start."
    )
    threads_per_rank: int | None = Field(
        None, ge=1, description="CPU threads a rank uses; none: cores divided by all ranks of the run."
    )
    env: dict[str, str] = Field({}, description="Environment variables added for the ranks of this island.")
    link_args: list[str] = Field(
        [], description="Arguments added to this island's mpirun (hosts, interfaces)."
    )


class Grace(Block):
    """The adaptive grace window (Eq. 3 of the paper)."""

    safety: float = Field(
        0.8, ge=0, lt=1, description="gamma: share of the slack spent on waiting for others; 0 = no grace."
    )
    smoothing: float = Field(
        0.15, gt=0, le=1, description="Weight of the newest sample in the averages of step and sync times."
    )


class Merge(Block):
    """How the learners' outer gradients become one."""

    matrices: Literal["rda", "mean"] = Field(
        "rda",
        description="Merge of every tensor but the embedding: Radial-Directional Averaging or the weighted mean.",
    )
    embedding: Literal["rda", "mean"] = Field("mean", description="Merge of the token embedding.")
    norm: Literal["tensor", "fragment"] = Field(
        "tensor", description="Over what RDA takes a norm: each tensor or the whole fragment."
    )
    weights: Literal["tokens", "uniform", "expert_tokens"] = Field(
        "tokens",
        description="Weight of a learner: tokens^2 / steps (Sec. 3.2), or equal for all that made a step. expert_tokens: "
        "tokens, and each expert by the tokens routed to it, merged by itself (models with experts).",
    )
    anchor: Literal["global", "base"] = Field(
        "global",
        description="What a late answer's outer gradient is measured from: the syncer's fragment at the merge (App. D.2), "
        "or its own base version. Answers in time are on the current version, where the two are one.",
    )
    late: Literal["merge_next", "drop"] = Field(
        "merge_next",
        description="An answer after its round closed: kept for the fragment's next round, or dropped.",
    )
    outlier_factor: float = Field(
        50.0,
        gt=1,
        description="An update whose norm exceeds this many times the running median of its fragment is dropped.",
    )


class OuterOptimizer(Block):
    """The outer optimizer: one `torch.optim` instance per fragment, in the syncer."""

    name: str = Field("SGD", description="Class name in torch.optim.")
    args: dict[str, Any] = Field(
        {"lr": 0.7, "momentum": 0.9, "nesterov": True}, description="Arguments of that class."
    )
    scheduler: str = Field(
        "constant", description="transformers scheduler name for the outer learning rate, over merged tokens."
    )
    scheduler_args: dict[str, Any] = Field(
        {}, description="Further arguments of the scheduler (scheduler_specific_kwargs)."
    )
    warmup_tokens: int = Field(0, ge=0, description="Tokens over which the outer learning rate rises from 0.")


class Adoption(Block):
    """What a learner does with a new global fragment."""

    how: Literal["overwrite", "mix", "rebase", "none"] = Field(
        "overwrite",
        description="overwrite (paper); mix: alpha*own + (1-alpha)*global; rebase: global + own steps since the snapshot; "
        "none: never adopt (one island only: plain data-parallel training, the syncer keeps a copy).",
    )
    alpha: float = Field(0.5, ge=0, le=1, description="Share of the own weights kept by `mix`.")


class Syncer(Block):
    """The syncer process."""

    checkpoint_every_s: float = Field(
        60.0, gt=0, description="Seconds between checkpoints of the global state on disk."
    )
    keep_checkpoints: Positive = Field(
        2, description="Checkpoints kept on disk (syncer's and each island's); older ones are deleted."
    )
    lease_s: float = Field(
        10.0,
        gt=0,
        description="Least seconds of silence after which an island counts as absent; stretched to 10 of "
        "its own steps if those are longer.",
    )
    return_within_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that a syncer whose shared memory was lost waits for islands that may hold newer fragments "
        "than its checkpoint; islands train on meanwhile. 0: it does not ask.",
    )
    keep_updates: bool = Field(
        False,
        description="Keep every merged update on disk so that `replay` can recompute the weights (tests; large).",
    )
    threads: Positive = Field(1, description="CPU threads of the merge.")


class Exchange(Block):
    """Fragments, rotation, quorum, merge and adoption: the paper's machine and, as settings, its family."""

    fragments: int = Field(
        24, ge=1, description="P: fragments the model is divided into (fewer if there are fewer tensors)."
    )
    period: int = Field(24, ge=1, description="H: inner steps between two synchronisations of one fragment.")
    overlap: int = Field(
        2,
        ge=0,
        description="tau: inner steps a round may take, and the number of rounds in flight (0: one at a time).",
    )
    quorum: Positive = Field(
        1, description="K: learners that must be ready before a round opens, and answer before it merges."
    )
    grace: Grace = Field(Grace(), description="How long a round waits for more than K answers.")
    merge: Merge = Field(Merge(), description="How the answers of a round become one.")
    outer: OuterOptimizer = Field(OuterOptimizer(), description="What the syncer makes of a merged answer.")
    adoption: Adoption = Field(Adoption(), description="What a learner does with a new global fragment.")

    @model_validator(mode="after")
    def _fits(self) -> Exchange:
        if self.fragments > self.period:
            raise ValueError(
                f"fragments ({self.fragments}) must not exceed period ({self.period}): "
                "each fragment needs an inner step of its own"
            )
        if self.overlap >= self.period:
            raise ValueError(f"overlap ({self.overlap}) must be less than period ({self.period})")
        return self


class Trainer(Block):
    """The inner training step of every island. Optimizer, precision, ZeRO and clipping are in `deepspeed`."""

    scheduler: str = Field(
        "cosine",
        description="transformers scheduler name (get_scheduler) for the inner learning rate, over global tokens.",
    )
    scheduler_args: dict[str, Any] = Field(
        {}, description="Its further arguments (scheduler_specific_kwargs)."
    )
    warmup_tokens: int = Field(0, ge=0, description="Global tokens over which the learning rate rises.")
    checkpoint_every_s: float = Field(120.0, gt=0, description="Seconds between an island's own checkpoints.")
    checkpoint_in_background: bool = Field(
        True,
        description="Copy what a checkpoint holds to host memory (`diloco-ds plan` says how much) and write it while "
        "training goes on. false, or no such memory: no copy, and the island's steps wait until it is written.",
    )
    moments_within_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that a learner without optimizer moments of its own waits for each portion of a peer's, "
        "stretched to 15 of the peer's steps, before it starts with fresh ones. 0: it does not ask.",
    )
    loss_chunk: Positive = Field(
        4096,
        description="Tokens for which the loss over the vocabulary is computed at a time. Takes about 8 bytes for each of "
        "them and each entry of the vocabulary: 8 GiB with 256k entries.",
    )
    activation_checkpointing: bool = Field(False, description="Recompute activations (transformers' own).")
    compile: bool = Field(False, description="torch.compile the model (DeepSpeed engine.compile).")
    least_step_s: float = Field(
        0.0,
        ge=0,
        description="Seconds from one inner step to the next at least; 0: as fast as it goes. For drills with more islands "
        "than processors, where each shall have its own pace.",
    )


class Evaluation(Block):
    """What is measured on the global weights."""

    every_tokens: int | None = Field(
        None, ge=1, description="Merged tokens between two held-out evaluations; none: only at the end."
    )
    heldout_tokens: Positive = Field(100_000, description="Most held-out tokens evaluated each time.")
    tasks: list[str] = Field(
        [], description="lm-eval tasks at the end: stock names, or names of task files under `task_dirs`."
    )
    task_dirs: list[str] = Field([], description="Directories with local lm-eval task YAMLs.")
    limit: int | None = Field(None, ge=1, description="Examples per task; none: all.")
    batch_size: Positive = Field(8, description="Sequences evaluated at a time.")


class Wandb(Block):
    """Weights & Biases: one group per run, one wandb run per island and one for the syncer."""

    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        "auto", description="auto: online if the user is logged in, else offline."
    )
    project: str = Field("diloco_ds", description="wandb project.")
    entity: str | None = Field(None, description="wandb entity (team or user); none: the user's default.")


class Observe(Block):
    """Logs and views."""

    wandb: Wandb = Field(Wandb(), description="What Weights & Biases gets.")


class RunConfig(Block):
    """A whole run."""

    name: Name = Field(description="Name of the run; its directory is runs/NAME (NAME-2, ... if taken).")
    seed: int = Field(
        0, ge=0, lt=2**31, description="Seed of initial weights, data order and every random choice."
    )
    budget: Budget = Field(description="When the run is finished, in tokens.")
    model: Model = Field(description="The model, the same for all islands.")
    tokenizer: Tokenizer = Field(description="The tokenizer, the same for all islands.")
    data: Data = Field(description="The text, divided among the islands block by block.")
    islands: list[Island] = Field(min_length=1, description="The learners.")
    deepspeed: dict[str, Any] = Field(
        description="DeepSpeed config of every island (an island's own `deepspeed` is merged over it)."
    )
    exchange: Exchange = Field(Exchange(), description="How the islands' work is merged.")
    trainer: Trainer = Field(Trainer(), description="The inner step of every island.")
    syncer: Syncer = Field(Syncer(), description="The process that merges.")
    evaluation: Evaluation = Field(Evaluation(), description="What is measured on the global weights.")
    observe: Observe = Field(Observe(), description="What is logged where.")

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        names = [island.name for island in self.islands]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"islands: the name '{name}' is used twice; names must be unique")
        if self.exchange.quorum > len(self.islands):
            raise ValueError(
                f"exchange.quorum (K = {self.exchange.quorum}) must not exceed "
                f"the number of islands (M = {len(self.islands)})"
            )
        if self.exchange.adoption.how == "none" and len(self.islands) != 1:
            raise ValueError(
                "exchange.adoption.how: none is for one island only; two islands that never adopt would train apart"
            )
        return self

    def island(self, name: str) -> Island:
        """The island called `name`; KeyError if there is none."""
        for island in self.islands:
            if island.name == name:
                return island
        raise KeyError(name)

    def deepspeed_of(self, name: str) -> dict[str, Any]:
        """The DeepSpeed config of island `name`: the run's, with the island's own merged over it key by key."""
        return merged(self.deepspeed, self.island(name).deepspeed)


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid over it: mappings key by key, everything else replaced."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
