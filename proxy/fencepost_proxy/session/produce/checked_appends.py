"""The parts of a session that process Produce requests with checked appends, and requests about transactions."""

from __future__ import annotations

from fencepost_proxy.session.connection.core import Core
from fencepost_proxy.session.produce.admission import Admission
from fencepost_proxy.session.produce.arrival import Arrival
from fencepost_proxy.session.produce.barriers import Barriers
from fencepost_proxy.session.produce.completion import Completion
from fencepost_proxy.session.produce.drafts import Drafts
from fencepost_proxy.session.produce.forwarding import Forwarding
from fencepost_proxy.session.produce.idempotence import IdempotenceChecks
from fencepost_proxy.session.produce.refusals import Refusals
from fencepost_proxy.session.produce.topic_ids import TopicIds
from fencepost_proxy.session.transactions.appends import TransactionalAppends
from fencepost_proxy.session.transactions.commits import EndTxnRequests
from fencepost_proxy.session.transactions.joins import TransactionJoins


class CheckedAppends:
    """In the order of a request: it arrives, its appends are drafted, admitted, sent, and completed.

    `joins`, `commits` – partitions are added to its transaction; that ends.

    All of them are made when the first one is used, and most connections need none. Until then `made` is False.
    """

    __slots__ = (
        "_core",
        "admission",
        "arrival",
        "barriers",
        "commits",
        "completion",
        "drafts",
        "joins",
        "levels",
        "made",
        "transactions",
    )

    arrival: Arrival
    drafts: Drafts
    levels: IdempotenceChecks
    barriers: Barriers
    admission: Admission
    completion: Completion
    transactions: TransactionalAppends
    joins: TransactionJoins
    commits: EndTxnRequests

    def __init__(self, core: Core) -> None:
        self._core = core
        self.made = False

    def __getattr__(self, name: str) -> object:
        """Python calls it for a part that is not made."""
        if self.made:
            raise AttributeError(name)
        self.made = True
        self._make(self._core)
        return getattr(self, name)

    def _make(self, core: Core) -> None:
        state, holds, queue, pipelines, proofs = core.state, core.holds, core.queue, core.pipelines, core.proofs
        services, sequencers = state.services, state.sequencers
        self.joins = TransactionJoins(state, queue, proofs, services, sequencers)
        self.commits = EndTxnRequests(state, holds, queue, proofs, services.transactions)
        self.barriers = Barriers(state, holds, core.draining, services)
        self.transactions = TransactionalAppends(state, holds, queue, proofs, services, services.transactions)
        self.drafts = Drafts(state, pipelines, services, self.transactions)
        producers, forwarding = services.idempotence, Forwarding(queue, services)
        refusals = Refusals(state, queue, proofs, services, producers)
        self.levels = IdempotenceChecks(state, queue, pipelines, producers, forwarding)
        self.completion = Completion(
            state,
            queue,
            pipelines,
            proofs,
            core.in_progress,
            holds.throttling,
            services,
            producers,
            sequencers,
            self.transactions,
            self.barriers,
            forwarding,
            refusals,
            self.levels,
        )
        self.admission = Admission(
            state,
            holds,
            queue,
            pipelines,
            core.draining,
            services,
            services,
            sequencers,
            self.transactions,
            self.barriers,
            forwarding,
            refusals,
            self.completion,
        )
        self.arrival = Arrival(
            state,
            holds,
            queue,
            pipelines,
            proofs,
            core.threads,
            core.samples,
            services,
            TopicIds(state, pipelines, proofs, services),
            self.transactions,
            self.barriers,
            self.drafts,
            self.levels,
            self.admission,
            self.completion,
        )
