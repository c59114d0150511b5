// The keyboard: which key does what, wherever the focus is.

import { address } from "./parts.js";
import { VIEWS } from "./views/all.js";

export const GLOBAL_KEYS = [
  ["/", "the filter"],
  ["Esc", "leave the filter, or go back to the list"],
  ["g, then a letter", "another view"],
  ["y", "copy this view as text"],
  ["t", "light or dark"],
  ["?", "these keys"],
];

const SEQUENCE_MS = 1500; // between g and its letter

export class Keys {
  #app;
  #gAt = -Infinity;

  constructor(app) {
    this.#app = app;
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const isTyping = event.target.closest?.("input, textarea, select") !== null && event.target.closest !== undefined;
    if (event.key === "Escape") this.#escape(isTyping, event);
    else if (!isTyping) this.#command(event);
  }

  #escape(isTyping, event) {
    if (isTyping) {
      event.target.blur();
      document.querySelector("main .table")?.focus();
    } else if (this.#app.route.id !== null) this.#app.go(address(this.#app.route.view));
  }

  #command(event) {
    if (event.key === "g") {
      this.#gAt = performance.now();
      return;
    }
    const isSequence = performance.now() - this.#gAt < SEQUENCE_MS;
    this.#gAt = -Infinity;
    const view = isSequence ? VIEWS.find((one) => one.letter === event.key) : undefined;
    if (view) this.#app.go(address(view.id));
    else if (event.key === "/") document.getElementById("filter")?.focus();
    else if (event.key === "y") this.#app.copyView();
    else if (event.key === "t") this.#app.turnTheme();
    else if (event.key === "?") this.#app.showHelp();
    else if (event.key === "ArrowDown" && event.target === document.body)
      document.querySelector("main .table")?.focus();
    else return;
    event.preventDefault();
  }
}
