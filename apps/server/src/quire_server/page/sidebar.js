/** The list of conversations: search, rename, delete, export and import. */

import { ConversationStore } from "./conversations.js";
import { confirmed } from "./dialogs.js";
import { announce, byId, download, icon, iconButton, make } from "./dom.js";

/** @typedef {import("./conversations.js").Conversation} Conversation */

const DAY_MS = 24 * 3600 * 1000;
const MAX_SHOWN = 300;

export class Sidebar {
  /**
   * @param {import("./chat.js").Chat} chat
   * @param {import("./settings.js").Settings} settings
   * @param {() => void} showHelp
   */
  constructor(chat, settings, showHelp) {
    this.chat = chat;
    this.settings = settings;
    this.element = byId("sidebar");
    this.scrim = byId("scrim");
    this.search = make("input", { id: "search", type: "search", placeholder: "Search", "aria-label": "Search chats", oninput: () => this.draw() });
    this.list = make("nav", { id: "conversations", "aria-label": "Chats" });
    this.chooser = make("input", { id: "import-file", type: "file", accept: ".json,application/json", hidden: true, onchange: () => this.#import() });
    this.element.append(
      make("header", {}, make("h1", {}, "Quire"), iconButton("close", "Hide chats", () => this.toggle(false), { id: "hide-sidebar" })),
      make("button.new", { id: "new", type: "button", onclick: () => this.startNew() }, icon("plus"), "New chat"),
      make("div.search", {}, icon("search"), this.search),
      this.list,
      make("footer", {},
        iconButton("download", "Export all chats", () => this.#export(chat.store.all(), "quire-chats.json"), { id: "export" }),
        iconButton("upload", "Import chats", () => this.chooser.click(), { id: "import" }),
        iconButton("trash", "Delete all chats", () => this.#clear(), { id: "clear" }),
        iconButton("help", "Keyboard shortcuts (?)", showHelp, { id: "help" })),
      this.chooser,
    );
    this.search.addEventListener("keydown", (event) => this.#searchKey(event));
    this.scrim.addEventListener("click", () => this.toggle(false));
    chat.addEventListener("change", () => this.draw());
    this.isNarrow = matchMedia("(max-width: 820px)");
    this.isNarrow.addEventListener("change", () => this.#place());
    this.#place();
    this.draw();
  }

  #place() {
    this.#show(!this.isNarrow.matches && this.settings.showsSidebar);
  }

  #show(isShown) {
    this.element.hidden = !isShown;
    this.scrim.hidden = !isShown || !this.isNarrow.matches;
    document.querySelector("#show-sidebar")?.toggleAttribute("hidden", isShown && !this.isNarrow.matches);
    document.querySelector("#show-sidebar")?.setAttribute("aria-expanded", String(isShown));
  }

  /** @param {boolean} [isShown] */
  toggle(isShown = this.element.hidden) {
    if (!this.isNarrow.matches) this.settings.change({ showsSidebar: isShown });
    this.#show(isShown);
    if (isShown && this.isNarrow.matches) this.search.focus();
  }

  startNew() {
    this.chat.openNew();
    if (this.isNarrow.matches) this.toggle(false);
    byId("prompt").focus();
  }

  /** Show the list, to search in it. */
  focusSearch() {
    this.toggle(true);
    this.search.focus();
    this.search.select();
  }

  /** Open the chat that stands so many places below. @param {number} step */
  step(step) {
    const all = this.chat.store.search(this.search.value);
    const place = all.findIndex((each) => each.id === this.chat.conversation.id);
    const next = all[place < 0 ? 0 : Math.max(0, Math.min(all.length - 1, place + step))];
    if (next && next.id !== this.chat.conversation.id) this.chat.open(next);
  }

  draw() {
    const query = this.search.value.trim();
    const found = query ? this.chat.store.search(query) : this.chat.store.all();
    const groups = new Map();
    for (const each of found.slice(0, MAX_SHOWN)) {
      const label = query ? "Found" : age(each.updated);
      groups.set(label, [...(groups.get(label) ?? []), each]);
    }
    const sections = [...groups].map(([label, each]) => make("section", { "aria-label": label }, make("h2", {}, label), make("ul", {}, ...each.map((one) => this.#entry(one)))));
    const hidden = found.length - MAX_SHOWN;
    this.list.replaceChildren(...sections, !found.length && query ? make("p.none", {}, "Nothing found") : "", hidden > 0 ? make("p.none", {}, `${hidden} more: search for them`) : "");
  }

  /** @param {Conversation} conversation */
  #entry(conversation) {
    const isCurrent = conversation.id === this.chat.conversation.id;
    const open = make("button.title", { type: "button", title: conversation.title, onclick: () => this.#open(conversation), ondblclick: () => this.#rename(conversation, entry) }, conversation.title);
    if (isCurrent) open.setAttribute("aria-current", "page");
    const entry = make("li", {}, open, make("span.tools", {},
      iconButton("edit", `Rename ${conversation.title}`, () => this.#rename(conversation, entry)),
      iconButton("download", `Export ${conversation.title}`, () => this.#export([conversation], `${conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.json`)),
      iconButton("trash", `Delete ${conversation.title}`, () => this.#delete(conversation))));
    open.addEventListener("keydown", (event) => {
      if (event.key === "F2") this.#rename(conversation, entry);
      if (event.key === "Delete") this.#delete(conversation);
      if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); this.#focusNext(open, event.key === "ArrowDown" ? 1 : -1); }
    });
    return entry;
  }

  #focusNext(button, step) {
    const all = [...this.list.querySelectorAll("button.title")];
    all[all.indexOf(button) + step]?.focus();
  }

  #searchKey(event) {
    if (event.key === "ArrowDown") { event.preventDefault(); this.list.querySelector("button.title")?.focus(); }
    if (event.key === "Enter") this.list.querySelector("button.title")?.click();
    if (event.key === "Escape" && this.search.value) { event.stopPropagation(); this.search.value = ""; this.draw(); }
  }

  #open(conversation) {
    if (conversation.id !== this.chat.conversation.id) this.chat.open(conversation);
    if (this.isNarrow.matches) this.toggle(false);
    byId("prompt").focus();
  }

  #rename(conversation, entry) {
    let isOver = false;
    const box = make("input.rename-box", { value: conversation.title, "aria-label": "Name of the chat", maxLength: 200 });
    const end = async (keeps) => {
      if (isOver) return;
      isOver = true;
      if (keeps && box.value.trim()) {
        Object.assign(conversation, { title: box.value.trim(), named: true });
        await this.chat.store.save(conversation);
      }
      this.draw();
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") { event.stopPropagation(); end(false); }
    });
    box.addEventListener("blur", () => end(true));
    entry.replaceChildren(box);
    box.focus();
    box.select();
  }

  async #delete(conversation) {
    if (!(await confirmed(`Delete “${conversation.title}”?`, "Delete"))) return;
    if (conversation.id === this.chat.conversation.id) this.chat.openNew();
    await this.chat.store.remove(conversation.id);
    this.draw();
    announce("Chat deleted");
  }

  async #clear() {
    const count = this.chat.store.all().length;
    if (!count || !(await confirmed(`Delete all ${count} chats of this browser?`, "Delete all"))) return;
    this.chat.openNew();
    await this.chat.store.clear();
    this.draw();
  }

  /** @param {Conversation[]} conversations @param {string} name */
  #export(conversations, name) {
    download(name, ConversationStore.exportText(conversations));
  }

  async #import() {
    const [file] = this.chooser.files;
    this.chooser.value = "";
    if (!file) return;
    try {
      const count = await this.chat.store.importText(await file.text());
      byId("note").textContent = `${count} ${count === 1 ? "chat" : "chats"} imported`;
    } catch (error) {
      byId("note").textContent = `${file.name} cannot be imported: ${error.message}`;
    }
    this.draw();
  }
}

/** @param {number} time */
function age(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY_MS) return "Yesterday";
  return time >= today - 7 * DAY_MS ? "Last week" : new Date(time).toLocaleDateString(undefined, { month: "long", year: "numeric" });
}
