"""The channel between the two ranks of a link's MPI world.

MPI is used in its plainest form: two ranks, one thread, Isend and Irecv with Test, contiguous bytes. Messages
and data have a tag each, so that a message passes between the chunks of a fragment. Importing this module
initialises MPI; finalising is left out on purpose, since MPI_Finalize waits for a peer that may be dead.
"""

from __future__ import annotations

from collections import deque

import mpi4py

mpi4py.rc.thread_level = "funneled"
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402 (its settings come first)

from diloco_ds.exchange.channel import MAX_MESSAGE, Transfer  # noqa: E402

_MESSAGE_TAG, _DATA_TAG = 1, 2


class MpiChannel:
    """The way to the other rank of a two-rank communicator."""

    def __init__(self, comm: MPI.Comm) -> None:
        if comm.size != 2:
            raise ValueError(f"a link has 2 ranks, not {comm.size}")
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py turns error codes into exceptions
        self._comm = comm
        self._peer = 1 - comm.rank
        self._leaving: deque[tuple[MPI.Request, bytes]] = (
            deque()
        )  # MPI reads the bytes until the send is done
        self._incoming = bytearray(MAX_MESSAGE)
        self._expect_message()

    def send_message(self, message: bytes) -> None:
        """See Channel."""
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(message)} bytes is longer than {MAX_MESSAGE}")
        request = self._comm.Isend([message, MPI.BYTE], dest=self._peer, tag=_MESSAGE_TAG)
        self._leaving.append((request, message))

    def receive_message(self) -> bytes | None:
        """See Channel."""
        while self._leaving and self._leaving[0][0].Test():
            self._leaving.popleft()
        status = MPI.Status()
        if not self._arrival.Test(status):
            return None
        message = bytes(memoryview(self._incoming)[: status.Get_count(MPI.BYTE)])
        self._expect_message()
        return message

    def send(self, data: memoryview) -> Transfer:
        """See Channel."""
        request = self._comm.Isend([data, MPI.BYTE], dest=self._peer, tag=_DATA_TAG)
        return _MpiTransfer(request, data)

    def receive(self, data: memoryview) -> Transfer:
        """See Channel."""
        request = self._comm.Irecv([data, MPI.BYTE], source=self._peer, tag=_DATA_TAG)
        return _MpiTransfer(request, data)

    def _expect_message(self) -> None:
        self._arrival = self._comm.Irecv([self._incoming, MPI.BYTE], source=self._peer, tag=_MESSAGE_TAG)


class _MpiTransfer:
    """An Isend or Irecv under way."""

    def __init__(self, request: MPI.Request, data: memoryview) -> None:
        self.nbytes = 0
        self._request = request
        self._data = data  # kept alive until MPI is done with it
        self._arrived = False

    def done(self) -> bool:
        """See Transfer."""
        if not self._arrived:
            status = MPI.Status()
            self._arrived = self._request.Test(status)
            if self._arrived:
                self.nbytes = status.Get_count(MPI.BYTE)
        return self._arrived
