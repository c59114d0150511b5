"""The actions of the live screen: each request to the server, its confirmation, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from dynamo.cli.api_client import ServerError
from dynamo.cli.inspect.detail import decision_lines
from dynamo.cli.inspect.dialogs import ActionQuestion, ConfirmDialog, TextDialog
from dynamo.cli.inspect.screens import LinesScreen
from dynamo.protocol.inspector.views import RoutingView, StreamView, WorkerView

if TYPE_CHECKING:
    from dynamo.cli.inspect.app import InspectorApp

T = TypeVar("T")
READ_ONLY_ROLES: Final = ("viewer", "content")


class ServerActions:
    """The actions of one live screen."""

    def __init__(self, app: InspectorApp) -> None:
        self._app = app

    def ask_to_abort(self, stream: StreamView) -> None:
        """Confirm, then abort a request."""
        about = f"{stream.model or '-'}, key {stream.key or '-'}, {stream.phase}, {stream.output_tokens} tokens so far"
        question = ActionQuestion("abort", "request", stream.id, about)
        self._ask_to_act(question, lambda reason: self._app.client.abort(stream.id, reason))

    def ask_to_drain(self, worker: WorkerView) -> None:
        """Confirm, then drain a worker; one that is drained or quarantined already is taken back."""
        self._ask_to_change(worker, "drain")

    def ask_to_quarantine(self, worker: WorkerView) -> None:
        """Confirm, then quarantine a worker for a minute; one that is out already is taken back."""
        self._ask_to_change(worker, "quarantine")

    def _ask_to_change(self, worker: WorkerView, action: str) -> None:
        wanted = "undrain" if worker.state in ("draining", "quarantined") else action
        about = f"{worker.state}, {worker.running} requests run on it"
        question = ActionQuestion(wanted, "worker", worker.id, about)
        self._ask_to_act(question, lambda reason: self._app.client.change_worker(worker.id, wanted, reason))

    def ask_where(self, model: str) -> None:
        """Read a prompt, and show where it would go."""

        def problem_of(text: str) -> str | None:
            return None if text else "type a prompt"

        def show(decisions: list[RoutingView]) -> None:
            self._app.push_screen(
                LinesScreen(lambda width: [line for one in decisions for line in (*decision_lines(one, width), ())])
            )

        def go_on(prompt: str | None) -> None:
            if prompt is not None:
                self._in_thread(lambda: self._app.client.explain(model, prompt), show)

        self._app.push_screen(TextDialog(f"Where would this prompt go, for {model}?", "", problem_of), go_on)

    def _ask_to_act(self, question: ActionQuestion, act: Callable[[str], object]) -> None:
        problem = self._may_not()
        if problem is not None:
            self._app.tell(problem, "warning")
            return

        def go_on(reason: str | None) -> None:
            if reason is not None:
                done = f"{question.action} of {question.subject} {question.id}: the frontend took it"

                def told(answer: object) -> None:
                    missing = answer.get("partial") if isinstance(answer, dict) else None
                    if missing:
                        self._app.tell(f"{done}, but not {', '.join(map(str, missing))}", "warning")
                    else:
                        self._app.tell(done)

                self._in_thread(lambda: act(reason), told)

        self._app.push_screen(ConfirmDialog(question), go_on)

    def _may_not(self) -> str | None:
        fleet = self._app.fleet
        if fleet is None:
            return "nothing is known of the system yet"
        if fleet.read_only:
            return "read-only: the frontend runs with --inspect-read-only"
        return f"read-only: this key has the role {fleet.role}" if fleet.role in READ_ONLY_ROLES else None

    def _in_thread(self, ask: Callable[[], T], then: Callable[[T], None]) -> None:
        """Call the server in a thread; go on with the answer in the app, or show what went wrong."""
        app = self._app

        def work() -> None:
            try:
                answer = ask()
            except ServerError as error:
                app.call_from_thread(app.tell, str(error), "error")
            else:
                app.call_from_thread(then, answer)

        app.run_worker(work, thread=True)
