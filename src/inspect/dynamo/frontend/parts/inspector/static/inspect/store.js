// The picture of the system: a snapshot, kept up to date by patches.

const MAX_ENTRIES = 5000; // of one view: the server bounds what it sends, and this bounds a server that does not
const LISTS = [
  "frontends",
  "models",
  "residents",
  "workers",
  "streams",
  "recent",
  "routing",
  "caches",
  "prefixes",
  "errors",
  "events",
];

export class Store {
  fleet = null;
  totals = {};
  partial = [];
  seq = null;
  takenMs = null;
  #lists = new Map(LISTS.map((name) => [name, new Map()]));
  #known = new Set();
  #arrivedAt = 0;
  #isLive = false;

  /** Take a whole picture; a view that it does not have keeps its last entries, and `has` tells which views it has. */
  replace(picture) {
    this.fleet = picture.fleet ?? this.fleet;
    this.#known = new Set();
    for (const name of LISTS) {
      if (!picture[name]) continue;
      this.#lists.set(name, new Map(picture[name].map((entry) => [entry.id, entry])));
      this.#known.add(name);
    }
    this.totals = picture.totals ?? {};
    this.#seen(picture);
  }

  /**
   * Apply a patch: `set` has whole entries by VIEW/ID (an id may have slashes itself), `del` the keys of those that went,
   * `progress` what tokens have changed of streams, by id.
   */
  apply(patch) {
    for (const [key, entry] of Object.entries(patch.set ?? {})) {
      const slash = key.indexOf("/");
      if (slash < 0) {
        if (key === "fleet") this.fleet = entry;
        continue;
      }
      const list = this.#lists.get(key.slice(0, slash));
      if (list === undefined) continue; // a view that this page does not know
      list.set(key.slice(slash + 1), entry);
      if (list.size > MAX_ENTRIES) list.delete(list.keys().next().value);
    }
    const streams = this.#lists.get("streams");
    for (const [id, news] of Object.entries(patch.progress ?? {})) {
      const stream = streams.get(id);
      if (stream !== undefined) streams.set(id, { ...stream, ...news });
    }
    for (const key of patch.del ?? []) {
      const slash = key.indexOf("/");
      this.#lists.get(key.slice(0, slash))?.delete(key.slice(slash + 1));
    }
    if (patch.totals) this.totals = patch.totals;
    this.#seen(patch);
  }

  #seen(message) {
    this.seq = message.seq;
    this.takenMs = message.taken_ms;
    this.partial = message.partial ?? [];
    this.#arrivedAt = performance.now();
    this.#isLive = true;
  }

  /** The connection was lost: the clock of the picture stands still, because nothing is known of what came after. */
  freeze() {
    if (!this.#isLive) return;
    this.takenMs = this.now();
    this.#isLive = false;
  }

  /** The time by the server's clock, in ms; ages are reckoned from it. */
  now() {
    if (this.takenMs === null) return null;
    return this.#isLive ? this.takenMs + (performance.now() - this.#arrivedAt) : this.takenMs;
  }

  /** Whether the last picture had this view. */
  has(view) {
    return this.#known.has(view);
  }

  list(view) {
    return [...this.#lists.get(view).values()];
  }

  one(view, id) {
    return this.#lists.get(view).get(id);
  }

  /** How many there are, also of those that were not sent; undefined where nothing is known. */
  total(view) {
    return this.totals[view] ?? (this.has(view) ? this.#lists.get(view).size : undefined);
  }
}
