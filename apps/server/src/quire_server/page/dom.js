/** Making and changing elements. Text is always text: nothing here reads markup. */

const SVG = "http://www.w3.org/2000/svg";

/** Strokes of the icons, in a square of 24. */
const STROKES = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h10",
  search: "M11 4a7 7 0 1 0 0 14a7 7 0 0 0 0-14M16 16l4.5 4.5",
  settings: "M4 8h9M17 8h3M15 6v4M4 16h3M11 16h9M9 14v4",
  close: "M6 6l12 12M18 6L6 18",
  send: "M12 19V5M6 11l6-6l6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  redo: "M19 12a7 7 0 1 1-2-5M19 4v4h-4",
  forward: "M6 5l6 7l-6 7M13 5l6 7l-6 7",
  branch: "M7 4v16M7 14c0-4 10-2 10-7M17 7V4M4.500 4h5M14.500 4h5M4.500 20h5",
  trash: "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13",
  clip: "M19 11l-7 7a4.500 4.500 0 0 1-6.500-6.500l7.500-7.500a3 3 0 0 1 4.500 4.500l-7.500 7.500a1.500 1.500 0 0 1-2-2l6.500-6.500",
  mic: "M12 4a2.500 2.500 0 0 1 2.500 2.500v5a2.500 2.500 0 0 1-5 0v-5A2.500 2.500 0 0 1 12 4M6.500 11.500a5.500 5.500 0 0 0 11 0M12 17v3",
  left: "M14 6l-6 6l6 6",
  right: "M10 6l6 6l-6 6",
  down: "M12 5v14M6 13l6 6l6-6",
  tokens: "M4 7h5v4H4zM11 7h9v4h-9zM4 14h8v4H4zM14 14h6v4h-6z",
  download: "M12 4v11M7 11l5 5l5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5l5 5M5 20h14",
  help: "M9 9.500a3 3 0 1 1 4.500 2.600c-1 .6-1.500 1.100-1.500 2.400M12 18v.5",
  file: "M7 3h7l4 4v14H7zM14 3v4h4",
  tool: "M14 7a4 4 0 0 1 5-3l-2.500 2.500l1 2l2 1L22 7a4 4 0 0 1-5 5l-7 7.500a2 2 0 0 1-3-3z",
};

/**
 * An element.
 * @param {string} name  Tag, with classes behind dots: "div.card.open".
 * @param {Record<string, unknown>} [properties]  Properties, attributes, and listeners as `onclick`; undefined is left out.
 * @param {...(Node|string|null|undefined|false|(Node|string)[])} children  Many of them as a list: arguments are few.
 * @returns {HTMLElement}
 */
export function make(name, properties = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on") && typeof value === "function") element.addEventListener(key.slice(2), value);
    else if (key in element && !key.includes("-") && key !== "list") element[key] = value;
    else if (value !== false) element.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

/**
 * A picture that says nothing to screen readers.
 * @param {keyof typeof STROKES} name
 * @returns {SVGElement}
 */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("icon");
  path.setAttribute("d", STROKES[name]);
  svg.append(path);
  return svg;
}

/**
 * A button with a picture, whose name is its tooltip too.
 * @param {keyof typeof STROKES} picture
 * @param {string} label
 * @param {(event: Event) => void} onclick
 * @param {Record<string, unknown>} [properties]
 */
export function iconButton(picture, label, onclick, properties = {}) {
  return make("button.icon-button", { type: "button", title: label, "aria-label": label, onclick, ...properties }, icon(picture));
}

/**
 * @template {HTMLElement} T
 * @param {string} id
 * @returns {T}
 */
export function byId(id) {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`the page has no element #${id}`);
  return /** @type {T} */ (element);
}

/**
 * Make `old` look like `fresh` with as few changes as possible, so that selections, scroll positions and open folds stay.
 * @param {Node} old  In the document.
 * @param {Node} fresh  Used up.
 * @returns {Node} The node that stands in the document now.
 */
export function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.parentNode?.replaceChild(fresh, old);
    return fresh;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    const [before, after] = [old.nodeValue ?? "", fresh.nodeValue ?? ""];
    if (after.length > before.length && after.startsWith(before)) /** @type {Text} */ (old).appendData(after.slice(before.length));
    else if (before !== after) old.nodeValue = after;
    return old;
  }
  const [element, target] = [/** @type {Element} */ (old), /** @type {Element} */ (fresh)];
  for (const { name } of [...element.attributes]) if (!target.hasAttribute(name) && name !== "open") element.removeAttribute(name);
  for (const { name, value } of target.attributes) {
    if (element.getAttribute(name) !== value && name !== "open") element.setAttribute(name, value);
  }
  morphChildren(element, target);
  return old;
}

/** @param {Element} element  In the document. @param {Element} target  Its children are used up. */
function morphChildren(element, target) {
  const wanted = [...target.childNodes];
  while (element.childNodes.length > wanted.length) element.lastChild?.remove();
  wanted.forEach((child, index) => {
    const there = element.childNodes[index];
    if (there) morph(there, child);
    else element.append(child);
  });
}

/**
 * Copy a text, also on pages that are no secure context.
 * @param {string} text
 * @returns {Promise<boolean>} Whether it could be done.
 */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea.offscreen", { value: text, "aria-hidden": "true" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/**
 * Show on a button that its work was done.
 * @param {HTMLElement} button
 * @param {keyof typeof STROKES} picture  Its own.
 */
export function flashDone(button, picture) {
  button.replaceChildren(icon("check"));
  setTimeout(() => button.replaceChildren(icon(picture)), 1200);
}

/**
 * Hand the user a file.
 * @param {string} name
 * @param {string} text
 */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = make("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Say something to screen readers. @param {string} text */
export function announce(text) {
  byId("announcements").textContent = text;
}
