"""The decision which models are in memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo.residency.machine import (
    ESTIMATE_BYTES,
    PATIENCE_SECONDS,
    Action,
    Known,
    Memory,
    Order,
    Residence,
    Residency,
    Resident,
    UnloadReason,
    Verdict,
)

NAMES = ("a", "b", "c", "d")
BUDGET = 100


def models(*sizes: int, pinned: int = 0, known: Known = Known.MEASURED) -> list[Resident]:
    return [
        Resident(name, Memory(size, known), is_pinned=number < pinned)
        for number, (name, size) in enumerate(zip(NAMES, sizes, strict=False))
    ]


class Server:
    """What a shell does around the decision, with loads that take another amount of memory than was estimated."""

    def __init__(self, found: list[Resident], *, budget: int | None = BUDGET, idle: float | None = None) -> None:
        self.residency = Residency(found, budget_bytes=budget, idle_seconds=idle)
        self.now, self.largest_error = 0.0, 0
        self.orders: list[Order] = []
        self.grown: dict[str, int] = {}  # what models take by now that are being loaded

    def of(self, name: str) -> Resident:
        return self.residency.models[name]

    def decide(self) -> list[Order]:
        before = {name: (model.state, model.running) for name, model in self.residency.models.items()}
        orders = self.residency.decide(self.now)
        for order in orders:
            state, running = before[order.name]
            if order.reason is UnloadReason.OUTGROWN:
                assert state is Residence.LOADING
            elif order.action is Action.UNLOAD:
                assert state in (Residence.LOADED, Residence.CLOSING)
                assert not running, "a stream would be cut"
                assert not self.of(order.name).is_pinned
            else:
                assert state is Residence.ABSENT
        budget = self.residency.budget_bytes
        assert budget is None or self.residency.used_bytes <= budget + self.largest_error
        self.orders += orders
        return orders

    def arrive(self, name: str) -> Verdict:
        return self.residency.arrive(name, self.now)

    def end(self, name: str) -> None:
        self.residency.leave(name, self.now, was_running=True)

    def load(self, name: str, error: int = 0) -> None:
        self.largest_error = max(self.largest_error, error)
        taken = max(1, self.of(name).memory.needed + error, self.grown.pop(name, 0))
        self.residency.loaded(name, taken, self.now)

    def grow(self, name: str, taken: int) -> None:
        """Let a model that is being loaded take so much by now."""
        self.grown[name] = max(taken, self.grown.get(name, 0))
        self.largest_error = max(self.largest_error, self.grown[name] - self.of(name).memory.needed)
        self.residency.measured(name, self.grown[name])

    def gone(self, name: str) -> None:
        self.grown.pop(name, None)
        self.residency.gone(name, self.now)

    def fail(self, name: str) -> None:
        """Let a load fail, or a process die. Those that wait for the load are answered."""
        model = self.of(name)
        was_loading = model.state is Residence.LOADING
        self.grown.pop(name, None)
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
                    self.gone(model.name)
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
    known = data.draw(st.sampled_from([Known.ESTIMATED, Known.MEASURED]))
    server = Server(models(*sizes, pinned=pinned, known=known), idle=data.draw(st.sampled_from([None, 3.0])))
    for _ in range(data.draw(st.integers(1, 60))):
        model = data.draw(st.sampled_from(list(server.residency.models.values())))
        match data.draw(st.sampled_from(["arrive", "arrive", "step", "grow", "end", "give up", "break", "wait"])):
            case "arrive":
                server.arrive(model.name)
            case "step" if model.state is Residence.LOADING:
                server.load(model.name, data.draw(st.integers(-4, 15)))
            case "step" if model.state is Residence.UNLOADING:
                server.gone(model.name)
            case "grow" if model.state is Residence.LOADING:
                server.grow(model.name, data.draw(st.integers(5, 120)))
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
    if pinned and server.of("a").failure is None and not server.residency.never_fits(server.of("a")):
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
    assert server.decide() == [Order(Action.UNLOAD, "b", UnloadReason.ROOM)]
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
    assert server.decide() == [Order(Action.UNLOAD, "a", UnloadReason.ROOM)]


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
    assert server.decide() == [Order(Action.UNLOAD, "a", UnloadReason.IDLE)]


def test_the_first_load_of_a_model_has_all_the_room_that_there_is_or_a_gigabyte_more_than_estimated() -> None:
    server = Server(models(40, 40, known=Known.ESTIMATED))
    for name in ("a", "b"):
        server.arrive(name)
        server.decide()
        if name == "b":
            assert server.orders[-1] == Order(Action.UNLOAD, "a", UnloadReason.ROOM)
            server.gone("a")
            server.decide()
        server.load(name)
        server.end(name)
    server.arrive("a")
    assert server.decide() == [Order(Action.LOAD, "a")]  # what it takes is known now, and fits beside the other
    large = Server(models(40, 40, known=Known.ESTIMATED), budget=ESTIMATE_BYTES + 200)
    large.arrive("a")
    large.decide()
    large.load("a")
    large.arrive("b")
    assert large.decide() == [Order(Action.LOAD, "b")]


def test_a_load_that_outgrows_its_room_is_ended_and_begun_again_in_all_of_it() -> None:
    server = Server(models(40, 20))
    server.arrive("a")
    server.decide()
    server.load("a")
    server.end("a")
    server.arrive("b")
    assert server.decide() == [Order(Action.LOAD, "b")]
    server.grow("b", 60)
    assert server.decide() == []  # there is room for that
    server.grow("b", 61)
    assert server.decide() == [Order(Action.UNLOAD, "b", UnloadReason.OUTGROWN)]
    server.gone("b")
    assert server.of("b").waiting == 1
    assert server.decide() == [Order(Action.UNLOAD, "a", UnloadReason.ROOM)]
    server.gone("a")
    assert server.decide() == [Order(Action.LOAD, "b")]
    server.grow("b", 70)
    assert server.decide() == []
    server.load("b")
    assert (server.of("b").running, server.residency.used_bytes) == (1, 70)


def test_a_load_in_all_the_room_goes_on_when_a_pinned_model_takes_more() -> None:
    server = Server(models(40, 20, pinned=1, known=Known.ESTIMATED))
    server.decide()
    server.load("a")
    server.arrive("b")
    assert server.decide() == [Order(Action.LOAD, "b")]
    server.grow("b", 50)
    server.residency.measured("a", 45)  # there were 60 for the other one, and are 55
    assert server.decide() == []
    server.grow("b", 56)
    assert server.decide() == [Order(Action.UNLOAD, "b", UnloadReason.OUTGROWN)]


def test_a_load_that_outgrows_all_room_is_refused() -> None:
    server = Server(models(60, 30, 20, pinned=1))
    server.decide()
    server.load("a")
    server.arrive("b")
    server.decide()
    server.grow("b", 41)
    assert server.decide() == [Order(Action.UNLOAD, "b", UnloadReason.OUTGROWN)]
    server.gone("b")
    assert server.residency.never_fits(server.of("b"))
    assert server.decide() == []
    assert server.arrive("b") is Verdict.REFUSED
    assert server.arrive("c") is Verdict.WAITS
    assert server.decide() == [Order(Action.LOAD, "c")]


def test_a_model_that_was_loaded_before_takes_its_memory_and_is_no_second_time() -> None:
    server = Server(models(60, 60))
    server.residency.found("a", Residence.LOADED, server.now)
    server.arrive("b")
    assert server.residency.used_bytes == 60
    assert server.decide() == []  # it is in use until it is known that no request has it
    server.load("a")
    assert server.decide() == [Order(Action.UNLOAD, "a", UnloadReason.ROOM)]


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
