// The page: the key, the address, the watch, the frame around a view; draws what the store has.

import { Api, Resources } from "./api.js";
import { sparkline } from "./charts.js";
import { askKey, confirm, copyByHand, help } from "./dialogs.js";
import { h, render } from "./dom.js";
import { address, link } from "./parts.js";
import { Store } from "./store.js";
import { Watch } from "./stream.js";
import { UNKNOWN, age, bytes, clock, count, duration, figure, line, moment, sampled, share } from "./text.js";
import { VIEWS, viewOf } from "./views/all.js";
import { GLOBAL_KEYS, Keys } from "./keys.js";

const KEY_STORED = "inspector-key";
const THEME_STORED = "inspector-theme";
const LIMIT = 1000; // entries of a view
const HIDDEN_MS = 60_000; // a page that nobody sees stops watching after this long
const FILTER_MS = 400; // from the last letter of a filter to asking the server for it
const PATCH_MEASURE = "inspect:patch";

class App {
  store = new Store();
  api = new Api();
  resources = new Resources(this.api, () => this.draw());
  route = { view: "fleet", id: null, query: {} };
  connection = { state: "connecting" };
  notices = [];
  #watch = null;
  #watched = "";
  #keys = new Keys(this);
  #frame = 0;
  #hidden = null;
  #asked = null;
  #asking = false;

  start() {
    this.#takeKey();
    this.#applyTheme(localStorage.getItem(THEME_STORED));
    addEventListener("hashchange", () => this.#follow());
    document.addEventListener("keydown", (event) => this.#keys.pressed(event));
    document.addEventListener("visibilitychange", () => this.#seen());
    setInterval(() => this.#tick(), 1000);
    this.#follow();
  }

  // The key comes with the address once (`#k=…`), and does not stay there: not in the history, not on a projected screen.
  #takeKey() {
    const found = /^#(?:.*[#&?])?k=([^&]+)/.exec(location.hash);
    if (found) {
      this.api.key = decodeURIComponent(found[1]);
      history.replaceState(null, "", `${location.pathname}${location.search}#/fleet`);
    } else this.api.key = sessionStorage.getItem(KEY_STORED);
  }

  #follow() {
    if (/^#k=/.test(location.hash)) {
      this.#takeKey();
      this.#open(true);
    }
    const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
    const [view, ...rest] = path.split("/");
    const id = rest.length ? decoded(rest.join("/")) : null;
    const known = viewOf(view || "fleet");
    const isOther = this.route.view !== (known ? known.id : view) || this.route.id !== id;
    this.route = { view: known ? known.id : view, id, query: Object.fromEntries(new URLSearchParams(query)) };
    this.#open(false);
    this.drawNow();
    if (!isOther) return;
    scrollTo(0, 0);
    const current = document.querySelector("nav [aria-current]");
    if (current) reveal(current);
  }

  /** Go to an address of this page. */
  go(hash) {
    location.hash = hash;
  }

  /** Change what is asked in the address of this view; the history does not grow by every letter. */
  ask(changes) {
    const query = { ...this.route.query, ...changes };
    history.replaceState(null, "", address(this.route.view, this.route.id, query));
    this.route = { ...this.route, query };
    clearTimeout(this.#asked);
    this.#asked = setTimeout(() => this.#open(false), FILTER_MS);
    this.draw();
  }

  #open(again) {
    const view = viewOf(this.route.view);
    if (document.hidden && this.#hidden !== null) return;
    const names = [
      "fleet",
      "workers",
      "streams",
      ...(typeof view?.watch === "function" ? view.watch(this) : (view?.watch ?? [])),
    ];
    const asked = new URLSearchParams({ views: [...new Set(names)].join(","), limit: String(LIMIT) });
    // The server filters only where it does not send all rows: else typing would open the stream again for nothing.
    const filter = view?.serverFilter?.(this);
    if (filter) asked.set("filter", filter);
    const path = `/admin/v1/watch?${asked}`;
    if (path === this.#watched && this.#watch !== null && !again) return;
    this.#watch?.close();
    this.#watched = path;
    this.#watch = new Watch(
      this.api,
      path,
      (event, data) => this.#arrived(event, data),
      (state) => this.#connected(state),
    );
  }

  #arrived(event, data) {
    const begin = performance.now();
    if (event === "snapshot") {
      const [before, seenMs] = [this.store.fleet, this.store.takenMs];
      this.store.replace(data);
      const after = this.store.fleet;
      if (before && after && before.started_ms !== after.started_ms) {
        const isNew = after.started_ms > seenMs - 1000;
        this.notice(
          isNew
            ? `The server was restarted at ${clock(after.started_ms)}: what ran before is not listed any more.`
            : "Another process of the frontend answers now.",
        );
      }
    } else if (event === "patch") this.store.apply(data);
    else if (event === "error") return void this.notice(line(data.message ?? data.error?.message));
    this.drawNow();
    performance.clearMeasures(PATCH_MEASURE); // only the last one is kept; an observer sees all
    performance.measure(PATCH_MEASURE, { start: begin, end: performance.now(), detail: event });
  }

  #connected(connection) {
    const before = this.connection;
    if (connection.state === "connecting" && before.state === "live") return; // another view asks for other things
    this.connection =
      connection.state === "connecting" && before.state === "lost" ? { ...before, isTrying: true } : connection;
    if (connection.state === "lost") {
      this.store.freeze();
      if (before.state === "live") this.say("Connection lost");
    }
    if (connection.state === "live" && before.state !== "live") {
      if (before.since) this.notice(`Connected again after ${duration((Date.now() - before.since) / 1000)}.`);
    }
    if (this.connection.state === "lost") this.connection.since = before.since ?? Date.now();
    if (connection.state === "key") this.askKey(connection.message);
    if (connection.state !== before.state || connection.state === "lost") this.draw();
  }

  async askKey(message) {
    if (this.#asking) return;
    this.#asking = true;
    const given = await askKey(
      this.api.hasKey
        ? `The server does not know this key: ${line(message)}`
        : "The server asks for a key: one of an admin, or what `dynamo serve` printed.",
    );
    this.#asking = false;
    if (given === null) return;
    this.api.key = given.key;
    if (given.keep) sessionStorage.setItem(KEY_STORED, given.key);
    else sessionStorage.removeItem(KEY_STORED);
    this.#open(true);
  }

  #seen() {
    clearTimeout(this.#hidden);
    this.#hidden = null;
    if (document.hidden) {
      this.#hidden = setTimeout(() => {
        this.#watch?.close();
        this.#watch = null;
        this.store.freeze();
      }, HIDDEN_MS);
    } else if (this.#watch === null) this.#open(true);
    else this.draw();
  }

  #tick() {
    if (document.hidden) return;
    this.resources.tick();
    this.draw();
  }

  /** Tell the viewer about something that happened to the page. */
  notice(text) {
    this.notices = [...this.notices.slice(-3), { text, at: Date.now() }];
    this.say(text);
    this.draw();
  }

  /** The same for who listens instead of looking. */
  say(text) {
    document.getElementById("spoken").textContent = text;
  }

  /** Whether the viewer's key may abort, drain and quarantine here. */
  canOperate() {
    const { fleet } = this.store;
    return fleet !== null && !fleet.read_only && ["operator", "admin"].includes(fleet.role);
  }

  /** Ask, then post; says what the server answered. */
  async act({ title, what, typed, action, path }) {
    const given = await confirm({ title, what, typed, action });
    if (given === null) return;
    try {
      const answer = await this.api.post(path, given.reason ? { reason: given.reason } : {});
      const missing = (answer?.partial ?? []).map(line);
      this.notice(`${title} The server has accepted it${missing.length ? `, but not: ${missing.join(", ")}` : ""}.`);
    } catch (error) {
      this.notice(`${title} Refused: ${line(error.message)}`);
    }
  }

  async copy(text, what) {
    try {
      await navigator.clipboard.writeText(text);
      this.notice(`Copied ${what}.`);
    } catch {
      await copyByHand(text);
    }
  }

  copyView() {
    const view = viewOf(this.route.view);
    if (view === undefined) return undefined;
    const { fleet } = this.store;
    const head = `${view.label}${this.route.id ? ` ${this.route.id}` : ""}, ${fleet ? line(fleet.cluster) : UNKNOWN}, ${moment(this.store.now())}`;
    return this.copy(`${head}\n${location.href}\n\n${view.text(this)}\n`, "this view as text");
  }

  showHelp() {
    const view = viewOf(this.route.view);
    return help([
      ["Everywhere", GLOBAL_KEYS],
      ["Go to", VIEWS.map((one) => [`g ${one.letter}`, one.label])],
      [
        view?.label ?? "Tables",
        view?.keys ?? [
          ["↑ ↓ or j k", "choose a row"],
          ["Enter", "open it"],
          ["Home End PgUp PgDn", "far"],
        ],
      ],
    ]);
  }

  turnTheme() {
    const now =
      document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    const next = now === "dark" ? "light" : "dark";
    localStorage.setItem(THEME_STORED, next);
    this.#applyTheme(next);
    this.draw();
  }

  #applyTheme(theme) {
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  }

  /** Draw with the next frame, however often it is called before. */
  draw() {
    if (this.#frame === 0) this.#frame = requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const view = viewOf(this.route.view);
    document.title = `${view?.label ?? "?"}${this.store.fleet ? ` · ${line(this.store.fleet.cluster)}` : ""} · Inspector`;
    render(document.getElementById("app"), [
      this.#top(),
      h("div", { class: "body" }, this.#rail(view), this.#main(view)),
    ]);
    this.resources.sweep();
  }

  #top() {
    const { fleet } = this.store;
    const now = fleet?.now;
    const strip = now
      ? [
          ["req/s", figure(now.requests_per_second), "requests_per_second"],
          ["tok/s", figure(now.output_tokens_per_second), "output_tokens_per_second"],
          ["TTFT p50", duration(now.ttft_p50_seconds), null],
          ["p99", duration(now.ttft_p99_seconds), "ttft_p99_seconds"],
          ["ITL p50", duration(now.itl_p50_seconds), null],
          ["p99", duration(now.itl_p99_seconds), null],
          ["errors", share(now.error_share), null],
          ["refused", share(now.refused_share), null],
          ["shed/s", figure(now.shed_per_second), null],
          ...(typeof fleet.resident_bytes === "number" ? [["models", bytes(fleet.resident_bytes), null]] : []),
        ]
      : [];
    return h(
      "header",
      { class: "top" },
      h(
        "div",
        { class: "name" },
        h("b", null, fleet ? line(fleet.cluster) : "Inspector"),
        fleet
          ? h(
              "span",
              { class: "quiet" },
              `up ${age(fleet.started_ms, this.store.now())}`,
              fleet.version ? ` · ${line(fleet.version)}` : "",
            )
          : null,
      ),
      h(
        "div",
        { class: "strip" },
        strip.map(([label, value, history], at) =>
          h(
            "div",
            { class: "one", key: `${at}` },
            h("span", { class: "quiet" }, label),
            h("b", null, value),
            history
              ? sparkline(fleet.history?.[history], { label: `${label}, the last five minutes`, width: 64, height: 18 })
              : null,
          ),
        ),
      ),
      h(
        "div",
        { class: "tools" },
        this.#live(),
        fleet
          ? h(
              "span",
              { class: "badge", title: "the role of your key" },
              fleet.read_only ? "read-only" : line(fleet.role),
            )
          : null,
        h("button", { class: "icon", onclick: () => this.copyView(), title: "Copy this view as text (y)" }, "Copy"),
        h(
          "button",
          { class: "icon", onclick: () => this.turnTheme(), title: "Light or dark (t)", "aria-label": "Light or dark" },
          "◑",
        ),
        h("button", { class: "icon", onclick: () => this.showHelp(), title: "Keys (?)", "aria-label": "Keys" }, "?"),
      ),
    );
  }

  #live() {
    const { state } = this.connection;
    if (state === "live")
      return h(
        "span",
        { class: "state ok", title: `as of ${clock(this.store.takenMs)}` },
        h("span", { class: "mark", "aria-hidden": "true" }, "●"),
        "live",
      );
    if (state === "key")
      return h(
        "button",
        { class: "state bad", onclick: () => this.askKey("") },
        h("span", { class: "mark", "aria-hidden": "true" }, "■"),
        "key needed",
      );
    if (state === "lost")
      return h(
        "span",
        { class: "state bad" },
        h("span", { class: "mark", "aria-hidden": "true" }, "■"),
        "not connected",
      );
    return h("span", { class: "state" }, h("span", { class: "mark", "aria-hidden": "true" }, "○"), "connecting");
  }

  #rail(view) {
    return h(
      "nav",
      { class: "rail", "aria-label": "Views" },
      VIEWS.map((one) => {
        const number = one.count?.(this);
        return link(
          address(one.id),
          [
            h("span", { class: "label" }, one.label),
            number === undefined || number === null
              ? null
              : h("span", { class: `count ${one.tone?.(this) ?? ""}` }, number),
          ],
          { key: one.id, "aria-current": one === view ? "page" : null },
        );
      }),
    );
  }

  #main(view) {
    const content = view ? view.draw(this) : h("p", { class: "empty" }, `There is no view "${line(this.route.view)}".`);
    return h(
      "main",
      {
        id: "content",
        tabindex: "-1",
        class: `view-${view?.id ?? "none"}${this.connection.state === "lost" ? " stale" : ""}`,
      },
      this.#banners(),
      content,
    );
  }

  #banners() {
    const { state, message, retryAt, since, isTrying } = this.connection;
    const found = [];
    if (state === "lost") {
      const wait = Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
      const known = this.store.takenMs === null ? "" : ` These figures are of ${clock(this.store.takenMs)}.`;
      found.push(
        h(
          "div",
          { class: "banner bad", key: "lost", role: "alert" },
          h(
            "span",
            null,
            `Connection lost ${age(since, Date.now())} ago: ${line(message)}.${known} `,
            isTrying ? "Trying again …" : `Trying again in ${wait} s.`,
          ),
          h("button", { onclick: () => this.#watch?.now() }, "Try now"),
        ),
      );
    }
    if (this.store.partial.length)
      found.push(
        h(
          "div",
          { class: "banner warn", key: "partial" },
          h("span", null, `Did not answer in time: ${this.store.partial.map(line).join(", ")}. Their part is missing.`),
        ),
      );
    for (const notice of this.notices) {
      const drop = () => ((this.notices = this.notices.filter((one) => one !== notice)), this.draw());
      found.push(
        h(
          "div",
          { class: "banner", key: `notice ${notice.at} ${notice.text}` },
          h("span", null, notice.text),
          h("span", { class: "quiet" }, clock(notice.at)),
          h("button", { onclick: drop, "aria-label": "Dismiss" }, "×"),
        ),
      );
    }
    return found.length ? h("div", { class: "banners", key: "banners" }, found) : null;
  }

  /** What is listed of what there is, in words. */
  listed(view, shown) {
    const total = this.store.total(view);
    return `${sampled(shown, total)}${total !== undefined && shown < total ? " shown" : ""}`;
  }

  countOf(view) {
    const total = this.store.total(view);
    return total === undefined ? undefined : count(total);
  }
}

/** Scroll the parent of an element until it is seen. `scrollIntoView` would also move where Tab goes on from. */
function reveal(element) {
  const box = element.parentElement;
  const [outer, inner] = [box.getBoundingClientRect(), element.getBoundingClientRect()];
  box.scrollLeft += Math.min(0, inner.left - outer.left) + Math.max(0, inner.right - outer.right);
  box.scrollTop += Math.min(0, inner.top - outer.top) + Math.max(0, inner.bottom - outer.bottom);
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a hand-written address with a stray %
  }
}

new App().start();
