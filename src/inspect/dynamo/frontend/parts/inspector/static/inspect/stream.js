// Server-sent events over fetch (an EventSource cannot send an Authorization header), and a watch that comes back by itself.

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15_000;
const SILENCE_MS = 30_000; // the server sends something every second; after this long the connection is dead

/** From text in any pieces to events {event, data, id}. */
export class EventParser {
  #rest = "";
  #event = { event: "message", data: [], id: null };

  /** Return the events that are complete now. */
  feed(text) {
    const found = [];
    const parts = (this.#rest + text).split("\n");
    this.#rest = parts.pop();
    for (const part of parts) {
      const line = part.endsWith("\r") ? part.slice(0, -1) : part;
      if (line === "") {
        if (this.#event.data.length > 0) found.push({ ...this.#event, data: this.#event.data.join("\n") });
        this.#event = { event: "message", data: [], id: null };
        continue;
      }
      const colon = line.indexOf(":");
      if (colon === 0) continue; // a comment, which keeps the connection alive
      const name = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (name === "data") this.#event.data.push(value);
      else if (name === "event") this.#event.event = value;
      else if (name === "id") this.#event.id = value;
    }
    return found;
  }
}

/** Read the events of an answer to its end; `alive` is called for every piece that arrives. */
export async function readEvents(response, take, alive = () => {}) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    for (const event of parser.feed(value)) take(event);
  }
}

/**
 * Watches one path until it is closed.
 *
 * `report` gets the state of the connection: {state: "connecting"}, {state: "live"}, {state: "key", message} where a key is
 * asked for (it does not try again then), or {state: "lost", message, retryAt} with the time of the next attempt.
 */
export class Watch {
  #api;
  #path;
  #take;
  #report;
  #lastId = null;
  #failures = 0;
  #stopped = false;
  #abort = null;
  #timer = null;

  constructor(api, path, take, report) {
    this.#api = api;
    this.#path = path;
    this.#take = take;
    this.#report = report;
    this.#run();
  }

  close() {
    this.#stopped = true;
    clearTimeout(this.#timer);
    this.#abort?.abort();
  }

  /** Try again at once. */
  now() {
    if (this.#timer === null) return;
    clearTimeout(this.#timer);
    this.#run();
  }

  async #run() {
    this.#timer = null;
    this.#abort = new AbortController();
    this.#report({ state: "connecting" });
    let silence = null;
    const alive = () => {
      clearTimeout(silence);
      silence = setTimeout(
        () => this.#abort.abort(new Error(`nothing has arrived for ${SILENCE_MS / 1000} s`)),
        SILENCE_MS,
      );
    };
    try {
      alive();
      const headers = {
        accept: "text/event-stream",
        ...(this.#lastId === null ? {} : { "last-event-id": this.#lastId }),
      };
      const response = await this.#api.open(this.#path, { headers, signal: this.#abort.signal, cache: "no-store" });
      await readEvents(response, (event) => this.#taken(event), alive);
      this.#lost("the server closed the connection");
    } catch (error) {
      const reason = this.#abort.signal.reason;
      if (error.status === 401) this.#ask(error.message);
      else this.#lost(error.name === "AbortError" && reason ? reason.message : error.message);
    } finally {
      clearTimeout(silence);
    }
  }

  #taken(event) {
    if (this.#stopped) return;
    this.#failures = 0;
    if (event.id !== null) this.#lastId = event.id;
    this.#report({ state: "live" });
    this.#take(event.event, JSON.parse(event.data));
  }

  #ask(message) {
    if (!this.#stopped) this.#report({ state: "key", message });
  }

  #lost(message) {
    if (this.#stopped) return;
    const wait = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.#failures) * (0.75 + Math.random() / 2);
    this.#failures += 1;
    this.#report({ state: "lost", message, retryAt: Date.now() + wait });
    this.#timer = setTimeout(() => this.#run(), wait);
  }
}
