import base64
import json
import os
from types import SimpleNamespace

import pytest
from deepspeed.launcher import runner

from diloco_ds.config import RunConfig
from diloco_ds.errors import UserError
from diloco_ds.island import launch


def config(*islands):
    return RunConfig.model_validate(
        {
            "name": "test",
            "budget": {"tokens": 1000},
            "model": {"config_file": "model.yaml"},
            "tokenizer": {"train_vocab": 300},
            "data": {"sources": [{"files": "text.txt", "format": "text"}], "sequence_length": 16},
            "islands": list(islands),
            "deepspeed": {},
        }
    )


TWO = config(
    {"name": "a", "ranks": 2, "env": {"HELLO": "there"}},
    {"name": "b", "ranks": 1, "master_port": 29777, "threads_per_rank": 3},
)


def world(command):
    """The devices by host that DeepSpeed's launcher reads from the command."""
    (given,) = [each for each in command if each.startswith("--world_info=")]
    return json.loads(base64.urlsafe_b64decode(given.removeprefix("--world_info=")))


def test_the_command_is_deepspeeds_own_launcher_on_this_host(tmp_path):
    command = launch.launch_command(tmp_path, TWO, "b", None)
    assert command[1:4] == ["-u", "-m", "deepspeed.launcher.launch"]
    assert world(command) == {"localhost": [0]}
    assert command[command.index("--master_port") + 1] == "29777"
    assert command[-3:] == ["diloco_ds.island.learner", str(tmp_path), "b"]


def test_gpus_are_named_one_by_one(tmp_path):
    command = launch.launch_command(tmp_path, TWO, "a", [2, 5])
    assert world(command) == {"localhost": [2, 5]}


def test_it_is_the_command_that_deepspeed_itself_would_run(tmp_path, monkeypatch):
    """What `deepspeed` starts on one host, argument for argument but for its log level."""
    ours = launch.launch_command(tmp_path, TWO, "b", None)
    started = []

    class Started:
        returncode = 0

        def __init__(self, command, env):
            started.append(command)

        def wait(self):
            pass

    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=Started))
    runner.main(
        [
            *(
                "--hostfile",
                os.devnull,
                "--num_gpus",
                "1",
                "--master_addr",
                "127.0.0.1",
                "--master_port",
                "29777",
            ),
            *("--no_local_rank", "--module", *ours[-3:]),
        ]
    )
    (theirs,) = started
    said = {each for each in theirs if not each.startswith(("--log_level", "--enable_each_rank_log"))}
    joined = {"--master_addr=127.0.0.1", "--master_port=29777"}
    assert said - joined == set(ours) - {"--master_addr", "127.0.0.1", "--master_port", "29777"}


def test_each_start_takes_a_free_port(tmp_path):
    ports = {
        command[command.index("--master_port") + 1]
        for command in (launch.launch_command(tmp_path, TWO, "a", None) for _ in range(3))
    }
    assert all(1024 <= int(port) <= 65535 for port in ports)


def test_cores_are_shared_by_all_ranks_of_the_run(monkeypatch):
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _pid: set(range(8)))
    inherited = {"PATH": "/bin", "WORLD_SIZE": "99", "MASTER_ADDR": "elsewhere"}
    environment = launch.rank_environment(TWO, "a", inherited)
    assert environment["OMP_NUM_THREADS"] == "2"  # 8 cores, 3 ranks
    assert environment["HELLO"] == "there"
    assert environment["PATH"] == "/bin"
    assert "WORLD_SIZE" not in environment
    assert "MASTER_ADDR" not in environment
    assert launch.rank_environment(TWO, "b", inherited)["OMP_NUM_THREADS"] == "3"
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _pid: {0})
    assert launch.rank_environment(TWO, "a", inherited)["OMP_NUM_THREADS"] == "1"


def with_gpus(monkeypatch, number):
    class Device:
        def __init__(self, name):
            self.name = name

    monkeypatch.setattr(
        launch.Path, "glob", lambda _self, _pattern: [Device(f"nvidia{i}") for i in range(number)]
    )


def test_islands_take_the_visible_gpus_in_turn(monkeypatch):
    with_gpus(monkeypatch, 8)
    assert launch.devices_of(TWO, "a", {}) == [0, 1]
    assert launch.devices_of(TWO, "b", {}) == [2]
    assert launch.devices_of(TWO, "b", {"CUDA_VISIBLE_DEVICES": "4,5,7"}) == [7]
    assert launch.devices_of(TWO, "b", {"DS_ACCELERATOR": "cpu"}) is None
    own = config({"name": "a", "ranks": 2}, {"name": "b", "env": {"CUDA_VISIBLE_DEVICES": "0"}})
    assert launch.devices_of(own, "b", {"CUDA_VISIBLE_DEVICES": "4,5"}) == [0]


def test_without_a_gpu_deepspeed_takes_the_cpu(monkeypatch):
    with_gpus(monkeypatch, 0)
    assert launch.devices_of(TWO, "a", {}) is None


@pytest.mark.parametrize(
    ("visible", "says"), [("0,1", "2 GPUs are visible"), ("GPU-8a1b,GPU-77c0,GPU-12", "must list indices")]
)
def test_gpus_that_cannot_be_had_are_named(monkeypatch, visible, says):
    with_gpus(monkeypatch, 8)
    with pytest.raises(UserError, match=f"islands.b: .*{says}"):
        launch.devices_of(TWO, "b", {"CUDA_VISIBLE_DEVICES": visible})
