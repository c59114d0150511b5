// What a viewer may do to the system: each asks first, and each is refused by the server for who may not.

import { h } from "./dom.js";
import { UNKNOWN, line, tail } from "./text.js";

const WORKER = {
  drain: {
    button: "Drain",
    title: (id) => `Drain worker ${id}?`,
    what: "It gets no new requests; those that it has go on to their ends.",
    action: "Drain it",
  },
  quarantine: {
    button: "Quarantine",
    title: (id) => `Quarantine worker ${id}?`,
    what: "It gets no new requests until it is taken back or its quarantine ends.",
    action: "Quarantine it",
  },
  undrain: {
    button: "Take back",
    title: (id) => `Take worker ${id} back?`,
    what: "It gets requests again.",
    action: "Take it back",
  },
};

/** Ask, then drain, quarantine or take back a worker. */
export function actOnWorker(app, worker, name) {
  if (!app.canOperate()) return;
  const { title, what, action } = WORKER[name];
  const id = line(worker.id);
  void app.act({
    title: title(id),
    what: [what],
    typed: tail(worker.id),
    action,
    path: `/admin/v1/workers/${encodeURIComponent(worker.id)}/${name}`,
  });
}

/** What can be done to a worker in its state. */
export function workerButtons(app, worker) {
  if (!app.canOperate())
    return h("span", { class: "quiet" }, app.store.fleet?.read_only ? "read-only" : "an operator's key can");
  const isOut = worker.state === "draining" || worker.state === "quarantined";
  return (isOut ? ["undrain"] : ["drain", "quarantine"]).map((name) =>
    h(
      "button",
      {
        key: name,
        class: "small",
        onclick: () => actOnWorker(app, worker, name),
        "aria-label": `${WORKER[name].action}: ${line(worker.id)}`,
      },
      WORKER[name].button,
    ),
  );
}

/** Ask, then abort a request. */
export function abort(app, id) {
  if (!app.canOperate()) return;
  void app.act({
    title: `Abort request ${line(id)}?`,
    what: ["Its client gets the error request_aborted, and its engine stops. It cannot be undone."],
    typed: tail(id),
    action: "Abort it",
    path: `/admin/v1/requests/${encodeURIComponent(id)}/abort`,
  });
}

export function abortButton(app, id, kind = "") {
  return app.canOperate()
    ? h(
        "button",
        { class: `danger ${kind}`, onclick: () => abort(app, id), "aria-label": `Abort ${line(id)}` },
        "Abort",
      )
    : h("span", { class: "quiet" }, UNKNOWN);
}
