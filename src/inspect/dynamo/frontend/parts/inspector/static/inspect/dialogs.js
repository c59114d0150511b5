// Dialogs: a question that must be confirmed by typing, the key, text to copy by hand, the keys of the keyboard.

import { h, render } from "./dom.js";

/** Show a dialog until it is closed; `draw(close, redraw)` describes its content. Returns what `close` was given, null after Esc. */
export function show(title, draw) {
  return new Promise((done) => {
    const host = document.getElementById("dialogs");
    const node = document.createElement("dialog");
    const opener = document.activeElement;
    let answer = null;
    const close = (value) => {
      answer = value;
      node.close();
    };
    const redraw = () => render(node, [h("h2", { id: "dialog-title" }, title), draw(close, redraw)]);
    node.setAttribute("aria-labelledby", "dialog-title");
    node.addEventListener("close", () => {
      node.remove();
      if (opener?.isConnected) opener.focus({ preventScroll: true });
      done(answer);
    });
    host.append(node);
    redraw();
    node.showModal();
    node.querySelector("[data-first]")?.focus();
  });
}

/** Ask before something is done that cannot be taken back. Returns {reason}, or null. `typed`: what must be typed. */
export function confirm({ title, what, typed, action }) {
  const state = { typed: "", reason: "" };
  return show(title, (close, redraw) => {
    const isReady = state.typed.trim().toLowerCase() === typed.toLowerCase();
    const submit = (event) => {
      event.preventDefault();
      if (state.typed.trim().toLowerCase() === typed.toLowerCase()) close({ reason: state.reason.trim() });
    };
    return h(
      "form",
      { onsubmit: submit },
      what.map((text, at) => h("p", { key: `${at}` }, text)),
      h(
        "label",
        null,
        "Reason (it goes to the audit log and to the client)",
        h("input", {
          "data-first": true,
          name: "reason",
          maxlength: "200",
          autocomplete: "off",
          oninput: (event) => (state.reason = event.target.value),
        }),
      ),
      h(
        "label",
        null,
        h("span", null, "Type ", h("code", null, typed), " to confirm"),
        h("input", {
          name: "typed",
          autocomplete: "off",
          spellcheck: "false",
          oninput: (event) => ((state.typed = event.target.value), redraw()),
        }),
      ),
      h(
        "div",
        { class: "row end" },
        h("button", { type: "button", onclick: () => close(null) }, "Cancel"),
        h("button", { class: "danger", disabled: !isReady }, action),
      ),
    );
  });
}

/** Ask for the key. Returns {key, keep}, or null. */
export function askKey(message) {
  const state = { key: "", keep: false };
  return show("Key of an admin", (close) =>
    h(
      "form",
      {
        onsubmit: (event) => (
          event.preventDefault(),
          state.key.trim() && close({ key: state.key.trim(), keep: state.keep })
        ),
      },
      h("p", null, message),
      h(
        "label",
        null,
        "Key",
        h("input", {
          "data-first": true,
          name: "key",
          type: "password",
          autocomplete: "off",
          oninput: (event) => (state.key = event.target.value),
        }),
      ),
      h(
        "label",
        { class: "tick" },
        h("input", { name: "keep", type: "checkbox", onchange: (event) => (state.keep = event.target.checked) }),
        "Keep it in this tab until it is closed (sessionStorage)",
      ),
      h(
        "p",
        { class: "quiet" },
        "Otherwise the key stays in the memory of this page, and is forgotten when it is loaded again. It is sent to this server only.",
      ),
      h(
        "div",
        { class: "row end" },
        h("button", { type: "button", onclick: () => close(null) }, "Cancel"),
        h("button", { class: "primary" }, "Use this key"),
      ),
    ),
  );
}

/** Show text to copy by hand, where the browser does not let a page copy (an address without TLS that is not this machine). */
export function copyByHand(text) {
  return show("Copy this", (close) => [
    h(
      "p",
      { class: "quiet" },
      "The browser lets pages copy at https:// and localhost only. The text is selected: press Ctrl-C.",
    ),
    h("textarea", {
      "data-first": true,
      readonly: true,
      rows: "14",
      value: text,
      onfocus: (event) => event.target.select(),
    }),
    h("div", { class: "row end" }, h("button", { onclick: () => close(null) }, "Close")),
  ]);
}

/** Show the keys of the keyboard; `groups` is [[title, [[key, what it does], …]], …]. */
export function help(groups) {
  return show("Keys", (close) => [
    h(
      "div",
      { class: "keys" },
      groups.map(([title, keys]) =>
        h(
          "section",
          { key: title },
          h("h3", null, title),
          h(
            "dl",
            null,
            keys.map(([key, what]) => h("div", { key }, h("dt", null, h("kbd", null, key)), h("dd", null, what))),
          ),
        ),
      ),
    ),
    h("div", { class: "row end" }, h("button", { "data-first": true, onclick: () => close(null) }, "Close")),
  ]);
}
