"""A new run: checked and prepared before its directory exists; the directory is whole before anything starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich.console import Console

from diloco_ds.conductor import preflight
from diloco_ds.config import RunConfig
from diloco_ds.config_file import save_config
from diloco_ds.errors import UserError
from diloco_ds.rundir import RunDir, new_directory, obstacle, write_atomically

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
    elif why := obstacle(RUNS):
        raise UserError(f"{RUNS}: {why}; choose another place with --run-dir")
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
    """A directory that is this run's alone. If the block does not end well, what was made is removed again, and no more:
    an empty directory that was there stays.
    """
    with ExitStack() as undo:
        root = _named(run_dir, undo) if run_dir is not None else _free(name, undo)
        claim = _claim(root, undo)
        undo.callback(_empty, root, claim)
        yield RunDir(root.resolve())
        claim.rmdir()
        undo.pop_all()


def _named(run_dir: Path, undo: ExitStack) -> Path:
    try:
        _make_missing(run_dir, undo)
    except OSError as error:
        raise UserError(f"--run-dir: {run_dir} cannot be made: {error.strerror}") from error
    return run_dir


def _free(name: str, undo: ExitStack) -> Path:
    """runs/NAME, or the first of NAME-2, NAME-3, ... that does not exist."""
    try:
        _make_missing(RUNS, undo)
        root = new_directory(RUNS / name)
    except OSError as error:
        raise UserError(
            f"{RUNS}/{name} cannot be made: {error.strerror}; choose another place with --run-dir"
        ) from error
    undo.callback(_remove, root)
    return root


def _make_missing(folder: Path, undo: ExitStack) -> None:
    """Make `folder` and what is missing above it. OSError."""
    for path in reversed([folder, *folder.parents]):
        if not path.is_dir():
            with suppress(FileExistsError):  # another run has made it meanwhile, and removes it if it must
                path.mkdir()
                undo.callback(_remove, path)


def _claim(root: Path, undo: ExitStack) -> Path:
    """Make what says that `root` is being filled. UserError if another run fills it, or has."""
    claim = root / ".claimed"
    try:
        claim.mkdir()
    except FileExistsError:
        raise UserError(f"{root} is being filled by another run; name another with --run-dir") from None
    except OSError as error:
        raise UserError(f"{root} cannot be written to: {error.strerror}") from error
    undo.callback(claim.rmdir)
    if any(path != claim for path in root.iterdir()):
        raise UserError(f"{root} was taken by another run just now; name another with --run-dir")
    return claim


def _empty(root: Path, claim: Path) -> None:
    for path in root.iterdir():
        if path.is_dir() and path != claim:
            shutil.rmtree(path)
        elif path != claim:
            path.unlink()


def _remove(folder: Path) -> None:
    with suppress(OSError):  # somebody else has put something into it, or has removed it
        folder.rmdir()
