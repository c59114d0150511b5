"""The decision which models are in memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo.residency.machine import PATIENCE_SECONDS, Action, Order, Residence, Residency, Resident, Verdict

NAMES = ("a", "b", "c", "d")
BUDGET = 100


def models(*sizes: int, pinned: int = 0) -> list[Resident]:
    return [
        Resident(name, size, is_pinned=number < pinned)
        for number, (name, size) in enumerate(zip(NAMES, sizes, strict=False))
    ]


class Server:
    """What a shell does around the decision, with loads that take another amount of memory than was estimated."""

    def __init__(self, found: list[Resident], *, budget: int | None = BUDGET, idle: float | None = None) -> None:
        self.residency = Residency(found, budget_bytes=budget, idle_seconds=idle)
        self.now, self.largest_error = 0.0, 0
        self.orders: list[Order] = []

    def of(self, name: str) -> Resident:
        return self.residency.models[name]

    def decide(self) -> list[Order]:
        before = {name: (model.state, model.running) for name, model in self.residency.models.items()}
        orders = self.residency.decide(self.now)
        for order in orders:
            state, running = before[order.name]
            if order.action is Action.UNLOAD:
                assert state in (Residence.LOADED, Residence.CLOSING)
                assert not running, "a stream would be cut"
                assert not self.of(order.name).is_pinned
            else:
                assert state is Residence.ABSENT
        used = self.residency.used_bytes
        assert used <= BUDGET + self.largest_error or self.residency.budget_bytes is None
        self.orders += orders
        return orders

    def arrive(self, name: str) -> Verdict:
        return self.residency.arrive(name, self.now)

    def end(self, name: str) -> None:
        self.residency.leave(name, self.now, was_running=True)

    def load(self, name: str, error: int = 0) -> None:
        self.largest_error = max(self.largest_error, error)
        self.residency.loaded(name, max(1, self.of(name).bytes + error), self.now)

    def fail(self, name: str) -> None:
        """Let a load fail, or a process die. Those that wait for the load are answered."""
        model = self.of(name)
        was_loading = model.state is Residence.LOADING
        self.residency.failed(name, "it broke", self.now)
        if was_loading:
            self.answer_all(model)

    def answer_all(self, model: Resident) -> None:
        while model.waiting:
            self.residency.leave(model.name, self.now, was_running=False)
        while model.running:
            self.end(model.name)

    def settle(self) -> None:
        """Let everything that is under way come to its end, and see that every request has its turn."""
        for _ in range(200):
            self.decide()
            for model in self.residency.models.values():
                if model.state is Residence.LOADING:
                    self.load(model.name)
                elif model.state is Residence.UNLOADING:
                    self.residency.gone(model.name, self.now)
                elif self.residency.never_fits(model) and model.state is Residence.ABSENT:
                    self.answer_all(model)
                while model.running and model.state is not Residence.ABSENT:
                    self.end(model.name)
            self.now += 1.0
        assert not any(model.waiting or model.running for model in self.residency.models.values())


@given(st.data())
def test_whatever_happens_no_stream_is_cut_the_budget_holds_and_every_request_has_its_turn(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(5, 70), min_size=2, max_size=4))
    pinned = data.draw(st.integers(0, 1))
    server = Server(models(*sizes, pinned=pinned), idle=data.draw(st.sampled_from([None, 3.0])))
    for _ in range(data.draw(st.integers(1, 60))):
        model = data.draw(st.sampled_from(list(server.residency.models.values())))
        match data.draw(st.sampled_from(["arrive", "arrive", "step", "end", "give up", "break", "wait"])):
            case "arrive":
                server.arrive(model.name)
            case "step" if model.state is Residence.LOADING:
                server.load(model.name, data.draw(st.integers(-4, 15)))
            case "step" if model.state is Residence.UNLOADING:
                server.residency.gone(model.name, server.now)
            case "end" if model.running and model.state is not Residence.ABSENT:
                server.end(model.name)
            case "give up" if model.waiting:
                server.residency.leave(model.name, server.now, was_running=False)
            case "break" if model.state in (Residence.LOADING, Residence.LOADED, Residence.CLOSING):
                server.fail(model.name)
            case "wait":
                server.now += data.draw(st.sampled_from([0.1, 2.0, 10.0]))
        server.decide()
    server.settle()
    if pinned and server.of("a").failure is None:
        assert server.of("a").state is Residence.LOADED


def test_a_model_is_loaded_at_its_first_request_and_the_next_one_runs_at_once() -> None:
    server = Server(models(50))
    assert server.decide() == []
    assert server.arrive("a") is Verdict.WAITS
    assert server.decide() == [Order(Action.LOAD, "a")]
    server.load("a")
    assert server.of("a").running == 1
    assert server.arrive("a") is Verdict.RUNS


def test_the_model_that_was_not_used_for_longest_makes_room() -> None:
    server = Server(models(50, 50, 50))
    for name in ("a", "b"):
        server.arrive(name)
        server.decide()
        server.load(name)
        server.end(name)
        server.now += 1
    server.arrive("a")
    server.end("a")
    server.arrive("c")
    assert server.decide() == [Order(Action.UNLOAD, "b")]
    assert server.decide() == []  # its memory is not free before its process has ended
    server.residency.gone("b", server.now)
    assert server.decide() == [Order(Action.LOAD, "c")]


def test_a_model_that_is_used_without_a_pause_gives_way_after_a_while_and_not_under_a_stream() -> None:
    server = Server(models(80, 80))
    server.arrive("a")
    server.decide()
    server.load("a")
    server.arrive("b")
    assert server.decide() == []
    assert server.arrive("a") is Verdict.RUNS
    server.now += PATIENCE_SECONDS
    assert server.residency.next_look(server.now) is not None
    assert server.decide() == []
    assert server.arrive("a") is Verdict.WAITS
    server.end("a")
    assert server.decide() == []
    server.end("a")
    assert server.decide() == [Order(Action.UNLOAD, "a")]


def test_a_model_takes_requests_again_when_those_that_waited_for_its_room_have_left() -> None:
    server = Server(models(80, 80))
    server.arrive("a")
    server.decide()
    server.load("a")
    server.arrive("b")
    server.now += PATIENCE_SECONDS
    server.decide()
    server.arrive("a")
    assert (server.of("a").state, server.of("a").waiting) == (Residence.CLOSING, 1)
    server.residency.leave("b", server.now, was_running=False)
    server.decide()
    assert (server.of("a").state, server.of("a").running) == (Residence.LOADED, 2)


def test_a_pinned_model_is_loaded_without_a_request_and_stays() -> None:
    server = Server(models(50, 60, pinned=1), idle=1.0)
    assert server.decide() == [Order(Action.LOAD, "a")]
    server.load("a")
    server.now += 100
    assert server.decide() == []
    assert server.arrive("b") is Verdict.REFUSED  # it would never fit beside it


def test_an_idle_model_goes_and_one_with_a_stream_does_not() -> None:
    server = Server(models(50), idle=10.0)
    server.arrive("a")
    server.decide()
    server.load("a")
    server.now += 100
    assert server.decide() == []
    server.end("a")
    assert server.residency.next_look(server.now) == 10.0
    server.now += 10
    assert server.decide() == [Order(Action.UNLOAD, "a")]


def test_a_load_that_failed_is_tried_again_at_a_later_request_after_longer_and_longer_pauses() -> None:
    server = Server(models(50))
    pauses = []
    for _ in range(8):
        assert server.arrive("a") is Verdict.WAITS
        assert server.decide() == [Order(Action.LOAD, "a")]
        server.fail("a")
        failure = server.of("a").failure
        assert failure is not None
        pauses.append(failure.retry_at - server.now)
        assert server.arrive("a") is Verdict.REFUSED
        server.now = failure.retry_at
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_a_model_that_died_under_its_requests_is_loaded_again_at_once() -> None:
    server = Server(models(50))
    server.arrive("a")
    server.decide()
    server.load("a")
    server.fail("a")
    assert server.decide() == [Order(Action.LOAD, "a")]
    server.load("a")
    assert server.of("a").running == 1
