"""The fault matrix, played on one live run: every part of it is killed and stopped at every moment that it has.

Two tracks go on side by side at first: the learner of `a` is under fire on one; links, syncer, supervisor and conductor on
the other. The learner of `b` is never touched, and must not notice any of it. Then an island joins under fire, and the
run is stopped twice under fire. Each cell is one fault; what has become of it is
read from the run's own records afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
from failpoints import Armed, Failpoints
from live_run import LiveRun, kill, written

from diloco_ds.chaos.targets import NotThere, Targets
from diloco_ds.conductor.closing import newest_checkpoint
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.rundir import SharedMemory

HANG_S = 2.0
WITHOUT_EXCHANGE_S = 20.0
KILL, STAND = "SIGKILL", "SIGSTOP"
PROXY, AGENT = "0", "1"
"""Ranks of a link."""

Key = tuple[str, str]
"""Who, and when."""


@dataclass
class Cell:
    """One fault. `until`: when the victim was back and merged again; `survivors` made steps all that while."""

    since: float
    survivors: tuple[str, ...]
    until: float = 0.0
    problem: str | None = None


class Play:
    """Plays the whole matrix on `run`, which is started here with islands `a` and `b` and ends stopped."""

    def __init__(self, run: LiveRun, points: Failpoints) -> None:
        self.run, self.points = run, points
        self.cells: dict[Key, Cell] = {}
        self.without_exchange: tuple[float, float] = (0.0, 0.0)
        self.second_conductor: Any = None
        self.lost: str | None = None
        self.left_behind: list[Any] = []

    def play(self) -> None:
        """All of it."""
        run = self.run
        run.train()
        run.until(run.status, "the run directory appears")
        run.until_merged_again("a", "b", since=0.0)
        run.until(lambda: len(run.steps("b")) >= 20, "what is normal can be told")
        self._stop_the_whole_exchange()
        with ThreadPoolExecutor(2) as tracks:
            for track in [tracks.submit(self._learner_of_a), tracks.submit(self._everything_else)]:
                track.result()
        self._lose_syncer()
        self._join()
        self._stop_all_but_the_conductor()
        self._stop_without_conductor()

    # -- one cell

    @contextlib.contextmanager
    def _cell(self, who: str, when: str, survivors: str = "") -> Iterator[None]:
        """What goes wrong within is noted in the cell; the play goes on."""
        with self._cells((who,), when, survivors):
            yield

    @contextlib.contextmanager
    def _cells(self, whoever: Iterable[str], when: str, survivors: str = "") -> Iterator[None]:
        """Several that come in one go."""
        cell = Cell(time.time(), tuple(survivors))
        self.cells |= {(who, when): cell for who in whoever}
        try:
            yield
        except (AssertionError, NotThere, ProcessLookupError) as error:
            cell.problem = str(error)
        cell.until = time.time()

    def _struck(self, place: str, signal_name: str = KILL, **environment: str) -> int:
        """Arm a place and wait until a process is hit there; its id."""
        return self._hit(self.points.arm(place, signal_name, **environment))

    def _hit(self, armed: Armed) -> int:
        return int(self.run.until(armed.hit, f"a process comes by {armed.place}"))

    def _pid(self, target: str) -> int:
        def found() -> int:
            return Targets(self.run.dir).processes(target)[0].pid

        return int(self.run.until(found, f"{target} runs"))

    def _hang(self, target: str) -> float:
        """SIGSTOP for a while; when it was over. It is the same process afterwards."""
        pid = self._pid(target)
        with _standing(pid):
            time.sleep(HANG_S)
        assert self._pid(target) == pid, f"{target} was replaced, though it only stood still for {HANG_S} s"
        return time.time()

    # -- the exchange as a whole

    def _stop_the_whole_exchange(self) -> None:
        status = self.run.status()
        ends = [(island.pids.agent, island.pids.proxy) for island in status.islands]
        with _standing(*status.syncer.pids, *(pid for pair in ends for pid in pair)):
            since = time.time()
            time.sleep(WITHOUT_EXCHANGE_S)
            self.without_exchange = (since, time.time())
        self.run.until_merged_again("a", "b")

    # -- first track

    def _learner_of_a(self) -> None:
        """`b` is the survivor. Each time another incarnation of `a` must be merged."""
        learner = {"DILOCO_DS_LEARNER": "*/a/*"}
        faults: dict[Key, Callable[[], object]] = {
            ("rank", "hang"): lambda: os.kill(self._pid("a.rank0"), signal.SIGSTOP),  # for good
            ("rank", "kill"): lambda: kill(self._pid("a.rank0")),
            ("rank", "writing"): lambda: self._struck("learner.written", **learner),
            ("launcher", "kill"): lambda: kill(self._pid("a.launcher")),
            ("rank", "reading"): lambda: self._struck("learner.adopting", **learner),
            ("rank", "checkpoint"): lambda: self._struck("learner.saving", **learner),
        }
        for (who, when), fault in faults.items():
            with self._cell(who, when, survivors="b"):
                before = self.run.island("a")
                fault()
                self._merged_in_another_life("a", before.incarnation)

    def _merged_in_another_life(self, island: str, incarnation: int) -> None:
        run = self.run
        new = run.until(
            lambda: [
                record
                for record in run.records("event", event="started", role="learner", island=island)
                if record["incarnation"] > incarnation
            ],
            f"{island} starts again",
        )
        run.until_merged_again(island, since=new[-1]["time"])

    # -- second track

    def _everything_else(self) -> None:
        """Link of `b`, syncer, supervisor, conductor; not even the island behind them notices. Deaths of one part lie
        some seconds apart, or it would be started again with more and more delay.
        """
        self._kill_in_link("agent", "kill")
        self._strike_syncer("writing", "store.before_commit")
        self._hang_and_go_on("supervisor", "b.supervisor")
        self._strike_in_link("proxy", "writing", "link.receiving", PROXY)
        self._hang_and_go_on("launcher", "b.launcher")
        self._conductor_dies()
        self._strike_in_link("agent", "reading", "link.sending", AGENT)
        self._strike_syncer("reading", "syncer.taken")
        self._hang_and_go_on("agent", "b.agent")
        self._kill_in_link("proxy", "kill")
        self._hang_and_go_on("conductor", "conductor")
        self._hang_and_go_on("proxy", "b.proxy")
        self._strike_in_link("agent", "writing", "link.receiving", AGENT)
        self._supervisor_dies()
        self._strike_syncer("checkpoint", "checkpoint.before_rename")
        self._strike_in_link("proxy", "reading", "link.sending", PROXY)
        self._hang_and_go_on("syncer", "syncer")
        self._hang_and_go_on("mpirun", "b.mpirun")
        self._kill_in_link("mpirun", "kill")
        self._kill_syncer()

    def _hang_and_go_on(self, who: str, target: str) -> None:
        with self._cell(who, "hang", survivors="b"):
            self.run.until_merged_again("b", since=self._hang(target))

    def _kill_in_link(self, who: str, when: str) -> None:
        with self._cell(who, when, survivors="b"):
            proxy = self._pid("b.proxy")
            kill(self._pid(f"b.{who}"))
            self._link_is_back("b", proxy)

    def _strike_in_link(self, who: str, when: str, place: str, rank: str) -> None:
        with self._cell(who, when, survivors="b"):
            proxy = self._pid("b.proxy")
            self._struck(place, DILOCO_DS_ROLE="link.b", OMPI_COMM_WORLD_RANK=rank)
            self._link_is_back("b", proxy)

    def _link_is_back(self, island: str, proxy: int) -> None:
        self.run.until_merged_again(island, since=self.run.until_replaced("proxy", proxy, island))

    def _strike_syncer(self, when: str, place: str) -> None:
        with self._cell("syncer", when, survivors="b"):
            self._syncer_is_back(self._struck(place, DILOCO_DS_ROLE="syncer"))

    def _kill_syncer(self) -> None:
        with self._cell("syncer", "kill", survivors="b"):
            victim = self._pid("syncer")
            kill(victim)
            self._syncer_is_back(victim)

    def _syncer_is_back(self, victim: int) -> None:
        self.run.until_merged_again("b", since=self.run.until_replaced("syncer", victim))

    def _supervisor_dies(self) -> None:
        """Another one takes the learner over, which has trained on."""
        with self._cell("supervisor", "kill", survivors="b"):
            before = self.run.island("b")
            kill(self._pid("b.supervisor"))
            replaced = self.run.until_replaced("supervisor", before.pids.supervisor, "b")
            self.run.until_merged_again("b", since=replaced)
            self.run.until(lambda: self.run.island("b").pids.ranks, "it has found its ranks")
            after = self.run.island("b")
            assert (after.pids.ranks, after.incarnation) == (before.pids.ranks, before.incarnation)

    def _conductor_dies(self) -> None:
        """All goes on without one; the next takes over what runs."""
        with self._cell("conductor", "kill", survivors="b"):
            before = self.run.status()
            self._end_conductor_with(lambda pid: kill(pid))
            self.run.until_merged_again("b")
            assert self.run.status().state == "running"
            self._resume()
            self.run.until_merged_again("b")
            after = self.run.status()
            assert after.syncer.pids == before.syncer.pids
            assert after.islands[1].pids == before.islands[1].pids
            self.second_conductor = self.run.command("train", "--resume", str(self.run.dir.root))

    def _end_conductor_with(self, fault: Callable[[int], object]) -> None:
        conductor, self.run.conductor = self.run.conductor, None
        assert conductor is not None
        fault(conductor.pid)
        assert conductor.wait(60) == -signal.SIGKILL

    def _resume(self) -> None:
        conductor = self.run.resume()
        self.run.until(
            lambda: self.run.status().conductor_pid == conductor.pid, "the new conductor is at work"
        )

    # -- the syncer's host

    def _lose_syncer(self) -> None:
        """Its process, the proxies beside it and all their shared memory are gone, as with their host; the islands hold
        fragments that are newer than the last checkpoint.
        """
        run = self.run
        with self._cell("syncer", "lost", survivors="ab"):
            victims = [self._pid(target) for target in ("syncer", "a.proxy", "b.proxy")]
            run.until(lambda: self._stands_ahead(victims[0]), "something is merged that no checkpoint holds")
            run.until(self._all_has_arrived, "the islands hold what was merged")
            for pid in victims[1:]:
                os.kill(pid, signal.SIGSTOP)
            shared = SharedMemory(run.run_id())
            for folder in (shared.store, shared.syncer_end("a"), shared.syncer_end("b")):
                shutil.rmtree(folder)
            for pid in victims:
                kill(pid)
            self._syncer_is_back(victims[0])
            self.lost = run.status().syncer.lost

    def _stands_ahead(self, syncer: int) -> bool:
        """Stop the syncer; whether it has merged what its newest checkpoint does not hold. If not it goes on."""
        os.kill(syncer, signal.SIGSTOP)
        self.run.until(
            lambda: psutil.Process(syncer).status() == psutil.STATUS_STOPPED, "the syncer stands still"
        )
        theta = FragmentBox.open(SharedMemory(self.run.run_id()).store / "theta")
        saved = json.loads((newest_checkpoint(self.run.dir) / "state.json").read_text())["fragments"]
        ahead = [theta.version(p) > each["version"] for p, each in enumerate(saved)]
        if sum(ahead) >= 2:
            return True
        os.kill(syncer, signal.SIGCONT)
        return False

    def _all_has_arrived(self) -> bool:
        shared = SharedMemory(self.run.run_id())
        theta = FragmentBox.open(shared.store / "theta")
        inboxes = [FragmentBox.open(shared.island_end(name) / "inbox") for name in "ab"]
        return all(
            inbox.version(p) == theta.version(p) for inbox in inboxes for p in range(len(theta.numels))
        )

    # -- an island that joins

    def _join(self) -> None:
        """Whoever has a part in a join dies in it, one after the other; in the end the island is merged."""
        run, arm = self.run, self.points.arm
        agent, proxy = ({"DILOCO_DS_ROLE": "link.c", "OMPI_COMM_WORLD_RANK": rank} for rank in (AGENT, PROXY))
        learner = {"DILOCO_DS_LEARNER": "*/c/*"}
        whoever = ("conductor", "syncer", "supervisor", "agent", "proxy", "mpirun", "launcher", "rank")
        with self._cells(whoever, "join", survivors="ab"):
            arm("conductor.joining")
            syncer_stands = arm("syncer.joining", STAND, DILOCO_DS_ROLE="syncer")
            supervisor = arm("supervisor.launching", DILOCO_DS_ROLE="supervisor.c")
            ends_die = [arm("link.connecting", **end) for end in (agent, proxy)]
            learner_stands = arm("learner.starting", STAND, **learner)
            self._end_conductor_with(lambda _: run.command("join", str(run.dir.root), "--island", "c"))
            syncer = self._hit(syncer_stands)
            self._resume()
            kill(syncer)
            run.until_replaced("syncer", syncer)
            for armed in ends_die:
                self._hit(armed)
            agent_stands = arm("link.connecting", STAND, **agent)
            run.until(lambda: agent_stands.hit() or self._is_connected("c"), "the link is there again")
            if not agent_stands.hit():  # it was quicker: once more
                kill(self._pid("c.proxy"))
                self._hit(agent_stands)
            with contextlib.suppress(
                NotThere, ProcessLookupError
            ):  # mpirun does not wait long for one that stands
                kill(self._pid("c.mpirun"))
            self._hit(supervisor)
            self._hit(learner_stands)
            kill(self._pid("c.launcher"))
            self._struck("learner.adopting", **learner)
            run.until_merged_again("c")

    def _is_connected(self, island: str) -> bool:
        return bool(written(self.run, f"status/agent.{island}.json")["state"] == "connected")

    # -- stops

    def _stop_all_but_the_conductor(self) -> None:
        """Of each island the learner's side and the link's are hit, and the syncer before its last checkpoint: its state
        stays in shared memory, and the run goes on from it.
        """
        run, arm = self.run, self.points.arm
        run.until_merged_again("a", "b", "c")
        with self._cells(("rank", "launcher", "supervisor", "agent", "proxy", "mpirun", "syncer"), "stop"):
            places = [
                arm("learner.ending", DILOCO_DS_LEARNER="*/a/*"),
                arm("supervisor.stopping", DILOCO_DS_ROLE="supervisor.c"),
                arm("link.stopping", DILOCO_DS_ROLE="link.a", OMPI_COMM_WORLD_RANK=AGENT),
                arm("link.stopping", DILOCO_DS_ROLE="link.b", OMPI_COMM_WORLD_RANK=PROXY),
                arm("syncer.ending", DILOCO_DS_ROLE="syncer"),
            ]
            rank_stands = arm("learner.ending", STAND, DILOCO_DS_LEARNER="*/b/*")
            agent_stands = arm("link.stopping", STAND, DILOCO_DS_ROLE="link.c", OMPI_COMM_WORLD_RANK=AGENT)
            launcher, mpirun = self._pid("b.launcher"), self._pid("c.mpirun")
            run.press_ctrl_c()
            self._hit(rank_stands)
            kill(launcher)
            self._hit(agent_stands)
            with contextlib.suppress(ProcessLookupError):  # it does not wait long for one that stands
                kill(mpirun)
            for armed in places:
                self._hit(armed)
            assert run.end(within_s=90) == 130
            run.conductor = None
            assert run.processes() == []
            assert "its state is kept in shared memory" in (run.work / "terminal.txt").read_text()
            self._resume()
            run.until_merged_again("a", "b", "c")

    def _stop_without_conductor(self) -> None:
        """What was asked to end does; `diloco-ds stop` ends the rest."""
        run = self.run
        with self._cell("conductor", "stop"):
            self.points.arm("conductor.stopping")
            self._end_conductor_with(lambda pid: os.kill(pid, signal.SIGINT))
            run.until(lambda: not run.status().syncer.pids, "the syncer ends")
            done = run.command("stop", str(run.dir.root))
            assert done.returncode == 0, done.stderr
        self.left_behind = [
            *run.processes(),
            *SharedMemory(run.run_id()).root.parent.glob(f"{run.run_id()}*"),
        ]


@contextlib.contextmanager
def _standing(*pids: int) -> Iterator[None]:
    """They are stopped meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).resume()
