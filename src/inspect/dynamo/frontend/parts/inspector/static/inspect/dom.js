// Descriptions of elements, and the keyed diff that makes the document match them.
// Text goes into text nodes only; attributes that could run something are refused. So nothing that a client sent is ever parsed.

import { visible } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const SHOWN = Symbol("what this node shows");
const PROPERTIES = new Set(["value", "checked", "disabled"]);
const REFUSED = new Set(["srcdoc", "style", "src", "action", "formaction", "xlink:href"]);
const READ = new Set(["title", "aria-label", "placeholder"]); // attributes that are shown or spoken
const NONE = Object.freeze({});

/** Describe an element. Children are strings, numbers, descriptions, arrays of these, or nothing (null, undefined, false). */
export function h(tag, props, ...children) {
  const given = props ?? NONE;
  return { tag, props: given, key: given.key ?? null, children: flat(children, []) };
}

function flat(children, into) {
  for (const child of children) {
    if (Array.isArray(child)) flat(child, into);
    else if (child !== null && child !== undefined && child !== false)
      into.push(typeof child === "object" ? child : String(child));
  }
  return into;
}

/** Make the children of `parent` what `children` describe. The focus stays where it is, if its element does. */
export function render(parent, children) {
  const focused = document.activeElement;
  patch(parent, flat([children], []), parent.namespaceURI === SVG);
  if (focused && focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
}

function patch(parent, wanted, isSvg) {
  const keyed = new Map();
  const kept = new Set();
  for (const want of wanted) if (want.key !== null && want.key !== undefined) kept.add(want.key);
  for (let node = parent.firstChild; node;) {
    const next = node.nextSibling;
    const key = node[SHOWN]?.key;
    if (key !== null && key !== undefined) {
      if (kept.has(key)) keyed.set(key, node);
      else node.remove(); // first, so that what stays need not move
    }
    node = next;
  }
  let next = parent.firstChild;
  for (const want of wanted) {
    if (typeof want === "string") {
      const text = visible(want);
      if (next !== null && next.nodeType === Node.TEXT_NODE) {
        if (next.data !== text) next.data = text;
        next = next.nextSibling;
      } else parent.insertBefore(document.createTextNode(text), next);
      continue;
    }
    let node = want.key === null ? reusable(next, want) : (keyed.get(want.key) ?? null);
    if (node !== null && node[SHOWN].tag !== want.tag) node = null;
    if (node === null) {
      node = create(want, isSvg);
      parent.insertBefore(node, next);
    } else {
      if (node === next) next = next.nextSibling;
      else parent.insertBefore(node, next);
      update(node, want, isSvg);
    }
  }
  while (next !== null) {
    const gone = next;
    next = next.nextSibling;
    gone.remove();
  }
}

function reusable(node, want) {
  const shown = node?.[SHOWN];
  return shown && shown.key === null && shown.tag === want.tag ? node : null;
}

function create(want, isSvg) {
  const inSvg = isSvg || want.tag === "svg";
  const node = inSvg ? document.createElementNS(SVG, want.tag) : document.createElement(want.tag);
  node[SHOWN] = { tag: want.tag, key: want.key, props: NONE, children: [] };
  update(node, want, inSvg);
  want.props.ref?.(node);
  return node;
}

function update(node, want, isSvg) {
  const before = node[SHOWN];
  if (before === want) return;
  node[SHOWN] = want;
  const { props } = want;
  for (const name in before.props) if (!(name in props)) assign(node, name, null);
  const late = [];
  for (const name in props) {
    if (name === "value")
      late.push(name); // also where it was the same: the viewer may have typed since
    else if (props[name] !== before.props[name]) assign(node, name, props[name], before.props[name]);
  }
  if (!props.opaque) patch(node, want.children, isSvg || want.tag === "svg");
  for (const name of late) assign(node, name, props[name]); // a select's value needs its options
}

function assign(node, name, value, before) {
  if (name === "key" || name === "ref" || name === "opaque") return;
  if (name.startsWith("on")) {
    if (value !== null && value !== undefined && typeof value !== "function")
      throw new TypeError(`${name} must be a function`);
    node[name] = value ?? null;
  } else if (name === "css") {
    for (const one in before ?? NONE) if (!(one in (value ?? NONE))) node.style.removeProperty(one);
    for (const one in value ?? NONE) node.style.setProperty(one, value[one]);
  } else if (PROPERTIES.has(name)) {
    if (node[name] !== value) node[name] = value ?? (name === "value" ? "" : false);
  } else if (REFUSED.has(name)) {
    throw new TypeError(`the attribute ${name} is not for this page`);
  } else if (value === null || value === undefined || value === false) {
    node.removeAttribute(name);
  } else {
    if (name === "href" && !/^(#|\/(?!\/)|blob:)/.test(value))
      throw new TypeError("a link leads into this page or this server only");
    node.setAttribute(name, value === true ? "" : READ.has(name) ? visible(value) : value);
  }
}
