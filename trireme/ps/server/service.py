"""One parameter server task: its replicas of shards, its service, and its membership."""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from trireme.certificates import Certificates
from trireme.cluster.coordinator import Coordinator, Journal
from trireme.cluster.member import Member
from trireme.cluster.member_protocol import MemberConfig, News
from trireme.cluster.messages import Dismissed, JobOver, StatusValue
from trireme.cluster.progress import LOCATION
from trireme.cluster.state import Policy
from trireme.cluster.view import View
from trireme.errors import CorruptedValues, JobFailed, TriremeError, WireError
from trireme.job_config import JobConfig
from trireme.plugins import Plugins
from trireme.ps.server.handler import ShardHandler
from trireme.ps.server.loop_watch import LoopWatch
from trireme.ps.server.measures import Measures, Report, measures_of
from trireme.ps.server.peer_links import PeerLinks
from trireme.ps.shard.values.segment_optimizer import load_optimizers
from trireme.wire.handshake import Identity
from trireme.wire.service import Handler, Service
from trireme.wire.transport import Listener, listen, local_memory

_ALONE_SECONDS = 5.0  # without a coordinator, until a server that is asked to end does

_log = logging.getLogger(__name__)

Recording = Callable[[Report, bool], object]  # takes a status, and whether it is the last


@dataclass(frozen=True, slots=True)
class ServerPart:
    """What a plug-in adds to each server: a handler of messages of its own.

    Attributes:
        open: the function from the handler of the server's shards to that handler.
    """

    open: Callable[[ShardHandler], Handler]


_PARTS = Plugins("trireme.server_parts", "part of a server", ServerPart)


@dataclass(frozen=True)
class ServerConfig:
    """One parameter server task."""

    job: str  # the job's id
    secret: bytes = field(repr=False)  # the job's
    index: int  # this server's task index
    listen: str  # the address to listen at, with its scheme; port 0 leaves it to the system
    coordinator: str | None  # the coordinator's address; None where this server hosts it
    policy: Policy  # the policy of a coordinator that is hosted here
    config: JobConfig = field(default_factory=JobConfig)  # the job's configuration
    certificates: Certificates | None = None  # this server's, where the job uses TLS
    journal: Journal | None = None  # of a coordinator that is hosted here; None where it keeps none
    host: str = ""  # the name of this host; "" for the name that the system has


def serve(
    server: ServerConfig,
    on_listening: Callable[[str], None],
    *,
    measures: Measures | None = None,
    record: Recording = lambda status, last: None,
) -> JobOver | None:
    """Serves replicas of shards until the job is over; returns how it ended, if it did.

    `record` is called with the server's status every half second, and at last with True.
    """
    # One BLAS thread a process is the launcher's business; autograd is of no use here.
    torch.set_grad_enabled(False)
    load_optimizers()
    listener = listen(
        server.listen,
        allow_plaintext=server.config.network.allow_plaintext,
        certificates=server.certificates,
    )
    on_listening(listener.address)
    return _Server(server, listener, measures or measures_of(server.index), record).run()


class _Server:
    def __init__(
        self, server: ServerConfig, listener: Listener, measures: Measures, record: Recording
    ) -> None:
        self._server = server
        self._record = record
        identity = Identity(server.job, f"ps:{server.index}")
        self._handler = ShardHandler(
            server.index, measures=measures, patience=server.policy.heartbeat_timeout
        )
        self._handler.on_report = self._report
        self._handler.config = server.config
        parts = _PARTS.all().values()
        handlers: list[Handler] = [self._handler, *(part.open(self._handler) for part in parts)]
        epoch = ""  # until this server has joined
        if server.coordinator is None:
            coordinator = Coordinator(
                server.policy, journal=server.journal, on_done=lambda: self._service.stop()
            )
            handlers.append(coordinator)
            epoch = coordinator.state.epoch
        self._service = Service(
            listener,
            handlers,
            job=server.job,
            secret=server.secret,
            epoch=epoch,
            serves=(identity.task, *(("coordinator:0",) if epoch else ())),
        )
        if server.config.shares_memory:
            self._service.listeners += beside(listener.address)
        if server.coordinator is None:
            coordinator.later = self._service.call_soon
        self._service.turned = self._handler.turn_over
        self._peers = PeerLinks(
            self._service,
            identity,
            server.secret,
            self._handler.connected,
            server.certificates,
            local=server.config.shares_memory,
        )
        self._handler.peers_changed = lambda peers, view: self._peers.want(
            peers, view, self._member.epoch
        )
        self._handler.peer_gone = self._peers.lost
        self._member = Member(
            MemberConfig(
                coordinator=server.coordinator or listener.address,
                job=server.job,
                role="ps",
                index=server.index,
                secret=server.secret,
                certificates=server.certificates,
                address=listener.address,
                host=server.host,
                connect_timeout=server.policy.join_timeout,
            )
        )
        self._handler.report = self._member.tell
        self._thread = threading.get_ident()  # of the service's loop
        self._watch = LoopWatch(
            server.policy.heartbeat_timeout, server.config.timeouts.progress_timeout or math.inf
        )
        self._member.extra_status = self._liveness
        self._member.able = self._is_able
        self._told = False  # to end, by a signal
        self._over: JobOver | None = None
        self._failure: Exception | None = None

    def run(self) -> JobOver | None:
        """Serves, and joins in another thread: this loop may serve the coordinator itself."""
        self._member.subscribe(self._heard)
        joining = threading.Thread(target=self._join, name="join", daemon=True)
        joining.start()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._signalled)
        try:
            self._service.run()
            self._record(self._handler.status(), True)
            if self._member.dismissed is not None:
                self._member.leave("finished", self._member.dismissed.reason)
        except CorruptedValues as error:
            if not error.others_go_on:  # the job ends, though others may hold copies
                self._member.leave("failed", str(error))
            raise
        finally:
            self._peers.close()
            self._member.close()
        if self._failure is not None:
            raise self._failure
        return self._over

    def _liveness(self) -> Mapping[str, StatusValue]:
        """Returns what a heartbeat says of the service's loop. In the member's thread."""
        turns, worked = self._service.turns, _seconds_of(self._thread)
        goes_on = self._watch.look(time.monotonic(), turns, worked)
        status = dict(self._watch.status)
        frame = None if goes_on else sys._current_frames().get(self._thread)
        if frame is not None:
            name = Path(frame.f_code.co_filename).name
            status[LOCATION] = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        return status

    def _is_able(self) -> bool:
        self._liveness()
        return not self._watch.overdue

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """Stops the job; this server stays until the workers have saved, and the job is over."""
        if self._told:  # by all who signal every process, and by Ctrl-C twice
            if number == signal.SIGINT:
                self._service.stop()
            return
        self._told = True
        if self._member.incarnation:
            self._member.signal(signal.Signals(number).name, stops=True)
        else:
            self._service.stop()  # it is in no job yet

    def _stop_if_alone(self) -> None:
        """Ends a server that is asked to end, if no coordinator is there to end it with its job."""
        away = self._member.away_since
        if self._told and away is not None and time.monotonic() - away >= _ALONE_SECONDS:
            self._service.stop()

    def _join(self) -> None:
        try:
            self._member.join()
        except JobFailed:  # `over` says how
            # A coordinator here goes on until the other tasks know, and then stops the service.
            if self._server.coordinator is not None:
                self._service.stop()
        except TriremeError as error:
            self._failure = error
            self._service.stop()

    def _heard(self, news: News) -> None:
        """Takes a new view, its dismissal, or the end of the job. In the member's thread."""
        if isinstance(news, Dismissed):
            self._service.stop()
            return
        if isinstance(news, View):
            self._service.epoch = self._handler.epoch = self._member.epoch
            self._service.call_soon(partial(self._handler.view, news, self._member.incarnation))
            return
        self._over = news
        self._peers.close()
        if self._server.coordinator is not None:
            self._service.stop()

    def _report(self, status: Report) -> None:
        self._stop_if_alone()
        self._member.report(status)
        self._record(status, False)


def _seconds_of(thread: int) -> float:
    if sys.platform != "linux":
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def beside(address: str) -> list[Listener]:
    """Returns listeners for workers of this host that lend memory; none where that cannot be."""
    local = local_memory()
    if local is None or not address.startswith(("tcp://", "tls://")):
        return []
    try:
        return [listen(local.address(address))]
    except WireError as error:
        _log.warning("no shared memory with workers of this host: %s", error)
        return []
