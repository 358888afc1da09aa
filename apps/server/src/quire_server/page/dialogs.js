/** Windows over the page: a question, and the keyboard's shortcuts. */

import { make } from "./dom.js";

/**
 * @param {string} question
 * @param {string} verb  On the button that says yes.
 * @returns {Promise<boolean>}
 */
export function confirmed(question, verb) {
  return new Promise((resolve) => {
    const yes = make("button.primary.danger", { type: "button", onclick: () => dialog.close("yes") }, verb);
    const no = make("button", { type: "button", onclick: () => dialog.close("") }, "Cancel");
    const dialog = /** @type {HTMLDialogElement} */ (make("dialog", { "aria-label": question }, make("p", {}, question), make("div.buttons", {}, no, yes)));
    shown(dialog, () => resolve(dialog.returnValue === "yes"));
  });
}

/**
 * @param {string} title
 * @param {[string, string][]} rows  Keys, and what they do.
 */
export function showKeys(title, rows) {
  const list = make("dl.keys", {}, ...rows.flatMap(([keys, what]) => [make("dt", {}, ...keys.split(" ").map((key) => make("kbd", {}, key))), make("dd", {}, what)]));
  const close = make("button", { type: "button", onclick: () => dialog.close() }, "Close");
  const dialog = /** @type {HTMLDialogElement} */ (make("dialog", { id: "keys", "aria-label": title }, make("h2", {}, title), list, make("div.buttons", {}, close)));
  shown(dialog, () => {});
}

/** @param {HTMLDialogElement} dialog @param {() => void} closed */
function shown(dialog, closed) {
  dialog.addEventListener("close", () => { dialog.remove(); closed(); });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(""); });
  document.body.append(dialog);
  dialog.showModal();
}
