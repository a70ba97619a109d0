"""A new run: checked and prepared before its directory exists; the directory is whole before anything starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from diloco_ds.conductor import preflight
from diloco_ds.config import RunConfig
from diloco_ds.config_file import save_config
from diloco_ds.errors import UserError
from diloco_ds.rundir import RunDir, new_directory, write_atomically

RUNS = Path("runs")


def new_run(
    config: RunConfig, run_dir: Path | None, argv: Sequence[str], console: Console, *, islands: bool = True
) -> RunDir:
    """Check `config`, prepare data and initial weights, and make the run directory: `run_dir`, or runs/NAME, NAME-2, ...

    UserError, with nothing left behind, for all that the user can put right. Takes as long as the data takes to prepare.
    """
    base_dir = Path.cwd()  # paths in a resolved configuration are absolute
    if run_dir is not None:
        preflight.check_run_dir(run_dir)
    for warning in preflight.check_host(config, islands=islands):
        console.print(f"warning: {warning}", highlight=False, style="yellow")
    preflight.check_wandb(config)
    console.print("checking the configuration", highlight=False, style="dim")
    preflight.check_sources(config, base_dir)
    preflight.check_training(config)
    layout = preflight.planned_layout(config, base_dir)
    preflight.check_shared_memory(config, layout, islands=islands)
    preflight.check_tasks(config)
    return _make(config, run_dir, argv, console, base_dir)


def _make(
    config: RunConfig, run_dir: Path | None, argv: Sequence[str], console: Console, base_dir: Path
) -> RunDir:
    from diloco_ds.core.fragments import balance
    from diloco_ds.data.prepare import prepare
    from diloco_ds.model.build import build_config, tensor_specs
    from diloco_ds.model.initial import initial_model, write_initial_weights
    from diloco_ds.observe.manifest import write_manifest

    prepared = prepare(config, base_dir, console)
    hf_config = build_config(config.model, prepared.vocab_size, prepared.special_tokens)
    with _claimed(run_dir, config.name) as run:
        scratch = run.root / ".weights"  # on the run's own disk: it may take as much as the model
        model = initial_model(config.model, hf_config, config.seed, scratch)
        layout = balance(tensor_specs(model), config.exchange.fragments, config.exchange.period)
        save_config(config, run.config)
        shutil.copytree(prepared.tokenizer, run.tokenizer)
        weights_sha256 = write_initial_weights(model, run.model_config)
        shutil.rmtree(scratch, ignore_errors=True)
        write_atomically(run.layout, layout.to_json())
        write_manifest(
            run.root,
            config,
            argv=argv,
            data=prepared.as_dict(),
            initial_weights_sha256=weights_sha256,
            layout_digest=layout.digest,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
        )
    return run


@contextmanager
def _claimed(run_dir: Path | None, name: str) -> Iterator[RunDir]:
    """A directory that is this run's alone; removed again if the block does not end well."""
    root = _claim_named(run_dir) if run_dir is not None else _claim_free(name)
    try:
        yield RunDir(root.resolve())
    except BaseException:
        shutil.rmtree(root)
        if run_dir is None:
            with suppress(OSError):  # other runs are in it
                RUNS.rmdir()
        raise


def _claim_named(run_dir: Path) -> Path:
    if run_dir.is_dir():  # empty, as was checked: mkdir below is what claims it
        run_dir.rmdir()
    try:
        run_dir.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--run-dir: {run_dir} cannot be made: {error.strerror}") from error
    return run_dir


def _claim_free(name: str) -> Path:
    """runs/NAME, or the first of NAME-2, NAME-3, ... that does not exist."""
    try:
        RUNS.mkdir(exist_ok=True)
        return new_directory(RUNS / name)
    except OSError as error:
        raise UserError(
            f"{RUNS}/{name} cannot be made: {error.strerror}; choose another place with --run-dir"
        ) from error
