"""A queue as anyone would write it on a napkin: a list of messages, looked at one by one."""

from dataclasses import dataclass, field

NEVER = 2**63 - 1


@dataclass
class Item:
    number: int
    body: str
    expires: int
    state: str = "active"  # active, locked, deferred, deferred-locked, scheduled, leased
    failures: int = 0
    until: int = NEVER  # of the lock or the schedule
    lock: object = None  # token, session or epoch
    session: str | None = None
    life: int | None = None


@dataclass
class QueueModel:
    lock_us: int = 60_000_000
    max_failures: int = 3
    dead_letters_expired: bool = True
    detects_duplicates_us: int | None = None
    items: list[Item] = field(default_factory=list)
    dead: list[Item] = field(default_factory=list)
    next_number: int = 1
    next_dead: int = 1
    graves: "QueueModel | None" = None  # gets the dead letters
    seen: dict[str, int] = field(default_factory=dict)
    taken: set[tuple[str, int]] = field(default_factory=set)
    sessions: dict[str, tuple[object, int]] = field(default_factory=dict)  # name -> lock, until
    session_states: dict[str, bytes] = field(default_factory=dict)
    leases: dict[int, tuple[str, int]] = field(default_factory=dict)  # epoch -> owner, until

    def send(
        self,
        body: str,
        now: int,
        *,
        message_id: str,
        life: int | None = None,
        due: int | None = None,
        session: str | None = None,
    ) -> int:
        if self.detects_duplicates_us is not None:
            first = self.seen.get(message_id)
            if first is not None and now - first < self.detects_duplicates_us:
                return 0
            self.seen[message_id] = now
        scheduled = due is not None and due > now
        begins = due if scheduled and due is not None else now
        item = Item(
            self.next_number,
            body,
            NEVER if life is None else begins + life,
            "scheduled" if scheduled else "active",
            until=begins if scheduled else NEVER,
            session=session,
        )
        self.items.append(item)
        self.next_number += 1
        return item.number

    def tick(self, now: int) -> None:
        for name in [name for name, (_, until) in self.sessions.items() if until <= now]:
            self.let_go(name, failed=True)
        for epoch in [epoch for epoch, (_, until) in self.leases.items() if until <= now]:
            self.end_lease(epoch)
        lapsed = [i for i in self.items if i.state.endswith("locked") and i.until <= now]
        for item in lapsed:
            self.fail(item)
        ripe = [i for i in self.items if i.state == "scheduled" and i.until <= now]
        for item in sorted(ripe, key=lambda i: (i.until, i.number)):
            self.items.remove(item)
            item.number, item.state, item.until = self.next_number, "active", NEVER
            self.next_number += 1
            self.items.append(item)
        for item in [i for i in self.items if i.state in ("active", "deferred")]:
            if item.expires <= now:
                self.items.remove(item)
                if self.dead_letters_expired:
                    self.bury(item)

    def fail(self, item: Item) -> None:
        item.failures += 1
        item.lock, item.until = None, NEVER
        if item.failures >= self.max_failures:
            self.items.remove(item)
            self.bury(item)
        else:
            item.state = "deferred" if item.state == "deferred-locked" else "active"

    def bury(self, item: Item) -> None:
        if self.graves is not None:
            self.graves.send(item.body, 0, message_id="")
            return
        self.dead.append(Item(self.next_dead, item.body, NEVER, failures=item.failures))
        self.next_dead += 1

    def deliverable(self, session: str | None = None) -> list[Item]:
        active = [i for i in self.items if i.state == "active"]
        return [i for i in active if session is None or i.session == session]

    def let_go(self, name: str, *, failed: bool) -> None:
        lock, _ = self.sessions.pop(name)
        for item in [i for i in self.items if i.lock == lock and i.state.endswith("locked")]:
            if failed:
                self.fail(item)
            else:
                item.state = "deferred" if item.state == "deferred-locked" else "active"
                item.lock, item.until = None, NEVER

    def end_lease(self, epoch: int) -> None:
        del self.leases[epoch]
        for item in self.items:
            if item.state == "leased" and item.lock == epoch:
                item.state, item.lock = "active", None

    def restart(self) -> None:
        """Locks are given back without counting as failures; leases stay."""
        self.sessions.clear()
        for item in self.items:
            if item.state.endswith("locked"):
                item.state = "deferred" if item.state == "deferred-locked" else "active"
                item.lock, item.until = None, NEVER
