import pytest

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


def test_the_command_is_deepspeeds_own_launcher_on_this_host(tmp_path):
    command = launch.launch_command(tmp_path, TWO, "b", None)
    assert command[0].endswith("deepspeed")
    assert command[1:3] == ["--num_gpus", "1"]
    assert command[command.index("--master_port") + 1] == "29777"
    assert command[-4:] == ["diloco_ds.program", "diloco_ds.island.learner", str(tmp_path), "b"]


def test_gpus_are_named_one_by_one(tmp_path):
    command = launch.launch_command(tmp_path, TWO, "a", [2, 5])
    assert command[1:3] == ["--include", "localhost:2,5"]
    assert "--num_gpus" not in command


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
