/** Views of the page, of which one is shown. */

import { byId, make } from "./dom.js";

/** @typedef {{id: string, name: string, skip: string, view: HTMLElement, toggle: (isOpen: boolean) => void}} Tab */

export class Tabs {
  /** @param {Tab[]} tabs  The first one is shown at first, unless the address names another (`#engine`). */
  constructor(tabs) {
    this.tabs = tabs;
    this.buttons = tabs.map((tab) => make("button", { type: "button", role: "tab", id: `tab-${tab.id}`, "aria-controls": tab.view.id, onclick: () => this.show(tab) }, tab.name));
    const list = byId("tabs");
    list.append(...this.buttons);
    list.addEventListener("keydown", (event) => {
      if (event.altKey || (event.key !== "ArrowLeft" && event.key !== "ArrowRight")) return;
      event.preventDefault();
      this.next(event.key === "ArrowLeft" ? -1 : 1);
      this.buttons[this.tabs.indexOf(this.shown)].focus();
    });
    this.shown = tabs[0];
    this.show(tabs.find((tab) => `#${tab.id}` === location.hash) ?? tabs[0]);
  }

  /** @param {Tab} shown */
  show(shown) {
    this.shown = shown;
    const skip = /** @type {HTMLAnchorElement} */ (document.querySelector(".skip"));
    skip.setAttribute("href", `#${shown.skip}`);
    skip.textContent = shown === this.tabs[0] ? "Skip to the message" : `Skip to the ${shown.id}`;
    this.tabs.forEach((tab, index) => {
      const isShown = tab === shown;
      tab.view.hidden = !isShown;
      this.buttons[index].setAttribute("aria-selected", String(isShown));
      this.buttons[index].tabIndex = isShown ? 0 : -1;
      tab.toggle(isShown);
    });
    history.replaceState(null, "", shown === this.tabs[0] ? location.pathname + location.search : `#${shown.id}`);
  }

  /** @param {number} [step] */
  next(step = 1) {
    const { length } = this.tabs;
    this.show(this.tabs[(this.tabs.indexOf(this.shown) + step + length) % length]);
  }
}
