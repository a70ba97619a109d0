"""The manifest: enough to judge a run and to make it again."""

import json
import re
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
from recorded_run import new_run
from tiny_run import tiny_config

import diloco_ds
from diloco_ds.cli import main
from diloco_ds.commands import train
from diloco_ds.errors import UserError
from diloco_ds.observe.manifest import (
    FORMAT,
    code_version,
    config_digest,
    manifest_to_go_on,
    new_run_id,
    package_versions,
    read_manifest,
    write_manifest,
)


def test_manifest_names_code_configuration_data_and_machine(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    manifest = read_manifest(run.root)
    assert run.run_id() == manifest["run_id"]
    assert re.fullmatch(r"\d{6}-\d{6}-[0-9a-f]{6}", manifest["run_id"])
    assert manifest["seed"] == 1
    assert manifest["stopping_rule"].startswith("1000000 tokens")
    assert manifest["model"] == {
        "parameters": 6_300_000,
        "initial_weights_sha256": "cd" * 32,
        "layout_digest": "ef" * 32,
    }
    assert manifest["data"]["train"]["sha256"] == "ab" * 32
    assert manifest["packages"]["torch"] is not None
    assert manifest["machine"]["cpus"] >= 1
    assert isinstance(manifest["machine"]["gpus"], list)


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    before = run.manifest.read_text()
    with pytest.raises(UserError, match="holds a run already") as refusal:
        _write_again(run.root)
    assert "\n" not in str(refusal.value)
    assert run.manifest.read_text() == before


def _write_again(root: Path) -> None:
    write_manifest(
        root, tiny_config(root), argv=[], data={}, initial_weights_sha256="", layout_digest="", parameters=0
    )


def test_a_run_of_an_older_format_is_refused_in_one_line_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)
    assert manifest_to_go_on(run.root)["format"] == FORMAT
    manifest = read_manifest(run.root)
    del manifest["format"]  # as the first ones were
    run.manifest.write_text(json.dumps(manifest))
    run.tape.write_bytes(b"")
    before = sorted(run.root.iterdir())
    given = dict.fromkeys(("run_file", "run_dir", "chaos"))
    with pytest.raises(UserError, match="is a run of format 1"):
        train._resume(
            Namespace(resume=run.root, no_islands=False, overrides=[], **given), stops=None, console=None
        )
    for arguments in (["replay", str(run.root)], ["leave", str(run.root), "a"]):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert f"is a run of format 1, made by diloco_ds {diloco_ds.__version__}; this is" in said
        assert said.count("\n") == 1
    assert sorted(run.root.iterdir()) == before
    assert main(["status", str(run.root), "--json"]) == 0, "it can still be looked at"


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run directory"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\xff"])
def test_a_file_that_is_no_manifest_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    for arguments in (["status"], ["stop"], ["report"], ["train", "--resume"]):
        assert main([*arguments, str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert str(tmp_path / "manifest.json") in said
        assert said.count("\n") == 1


def test_run_ids_are_unique() -> None:
    assert len({new_run_id() for _ in range(200)}) == 200


def test_the_digest_follows_the_configuration(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    assert config_digest(config) == config_digest(tiny_config(tmp_path))
    assert config_digest(config) != config_digest(tiny_config(tmp_path, seed=2))


def test_commit_of_a_checkout_and_whether_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "checkout" / "diloco_ds"
    package.mkdir(parents=True)
    source = package / "__init__.py"
    source.write_text("")
    monkeypatch.setattr("diloco_ds.__file__", str(source))
    assert code_version() == {"version": "0.1.0", "commit": None, "dirty": None}

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=package, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    assert code_version()["commit"] is None  # a checkout, but not of this package
    git("add", ".")
    git("commit", "-qm", "first")
    assert code_version() == {"version": "0.1.0", "commit": git("rev-parse", "HEAD"), "dirty": False}
    (package / "notes").write_text("untracked files do not count")
    assert code_version()["dirty"] is False
    source.write_text("changed = True\n")
    assert code_version()["dirty"] is True


def test_a_package_that_is_not_installed_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_ds.observe.manifest.PACKAGES", ("torch", "no-such-package"))
    versions = package_versions()
    assert versions["no-such-package"] is None
    assert json.dumps(versions)
