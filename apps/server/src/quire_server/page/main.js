/** The page: puts its parts together, connects to the server, and listens to the keyboard. */

import { ServerError, fetchChatSettings, fetchModels } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { ConversationStore, path, textOf } from "./conversations.js";
import { showKeys } from "./dialogs.js";
import { byId, copyText, announce, iconButton, make } from "./dom.js";
import { EngineView } from "./engine_view.js";
import { Settings } from "./settings.js";
import { SettingsPanel } from "./settings_panel.js";
import { Sidebar } from "./sidebar.js";
import { Tabs } from "./tabs.js";

const EXAMPLES = ["What is Quire?", "What is 27 + 35?", "Spell the word paper"];
const RETRY_MS = 1500;

/** Keys with Alt -> their effect. @type {[string, string, string][]} */
const KEYS = [
  ["Enter", "", "Send; with Shift, a line break"],
  ["Esc", "", "Stop the answer; close what is open"],
  ["/", "", "Go to the message"],
  ["Alt N", "KeyN", "New chat"],
  ["Alt K", "KeyK", "Search chats"],
  ["Alt ↑", "ArrowUp", "Newer chat"],
  ["Alt ↓", "ArrowDown", "Older chat"],
  ["Alt B", "KeyB", "Show or hide chats"],
  ["Alt S", "KeyS", "Settings"],
  ["Alt M", "KeyM", "Choose a model"],
  ["Alt V", "KeyV", "Chat or engine"],
  ["Alt E", "KeyE", "Edit the last question"],
  ["Alt R", "KeyR", "Regenerate the last answer"],
  ["Alt G", "KeyG", "Let the last answer go on"],
  ["Alt C", "KeyC", "Copy the last answer"],
  ["?", "", "These shortcuts"],
];

class Page {
  /** @param {ConversationStore} store */
  constructor(store) {
    this.settings = new Settings();
    this.chat = new Chat(store, this.settings);
    this.composer = new Composer(this.chat);
    byId("bar-start").append(iconButton("menu", "Show chats (Alt B)", () => this.sidebar.toggle(), { id: "show-sidebar", "aria-controls": "sidebar" }));
    byId("bar-end").append(
      iconButton("plus", "New chat (Alt N)", () => this.sidebar.startNew(), { id: "bar-new" }),
      iconButton("settings", "Settings (Alt S)", () => this.panel.toggle(), { id: "show-settings", "aria-controls": "settings", "aria-expanded": "false" }));
    this.sidebar = new Sidebar(this.chat, this.settings, () => this.showHelp());
    this.panel = new SettingsPanel(this.chat, this.settings, () => this.connect());
    const engine = new EngineView();
    this.tabs = new Tabs([
      { id: "chat", name: "Chat", skip: "prompt", view: byId("chat-view"), toggle: () => {} },
      { id: "engine", name: "Engine", skip: "engine-view", view: byId("engine-view"), toggle: (isOpen) => engine.toggle(isOpen) },
    ]);
    /** @type {import("./api.js").ModelCard[]} */
    this.models = [];
    this.model = /** @type {HTMLSelectElement} */ (byId("model"));
    this.model.addEventListener("change", () => this.#choose(this.model.value));
    this.chat.welcome = () => this.#welcome();
    this.chat.addEventListener("change", () => this.#showModel());
    this.chat.addEventListener("unauthorized", () => this.panel.showKey());
    this.settings.addEventListener("change", () => this.#showTheme());
    document.addEventListener("keydown", (event) => this.#key(event));
    this.#showTheme();
    this.chat.draw();
    this.composer.focus();
  }

  async connect() {
    clearTimeout(this.retry);
    const state = byId("connection");
    try {
      const [models, offered] = await Promise.all([fetchModels(), fetchChatSettings()]);
      this.models = models.filter((card) => card.parent !== null || card.root === models[0].root);
      this.settings.offered = offered;
      state.textContent = "";
      this.#fillPicker();
      this.#showModel();
      if (this.chat.isEmpty) this.chat.draw();
      if (!this.panel.element.hidden) this.panel.draw();
      document.body.dataset.connected = "true";
    } catch (error) {
      delete document.body.dataset.connected;
      if (error instanceof ServerError && error.status === 401) {
        state.textContent = "this server wants an API key";
        this.panel.showKey();
        return;
      }
      state.textContent = "no answer from the server; trying again";
      this.retry = setTimeout(() => this.connect(), RETRY_MS);
    }
  }

  #fillPicker() {
    const option = (card) => make("option", { value: card.id }, card.id);
    const adapters = this.models.filter((card) => card.parent !== null);
    const plain = this.models.filter((card) => card.parent === null).map(option);
    this.model.replaceChildren(...plain, adapters.length ? make("optgroup", { label: "Adapters" }, ...adapters.map(option)) : "");
  }

  /** The model of the chat; where it is not served any more, the first one. */
  #showModel() {
    if (!this.models.length) return;
    const { conversation } = this.chat;
    const card = this.models.find((each) => each.id === conversation.model) ?? this.models[0];
    conversation.model = card.id;
    this.model.value = card.id;
    const tasks = card.tasks ?? ["generate"];
    this.chat.transcribes = tasks.includes("transcription") && !tasks.includes("generate");
    this.composer.setModel(card.id, card.input_modalities ?? [], this.chat.transcribes);
  }

  #choose(id) {
    this.chat.conversation.model = id;
    this.#showModel();
    this.chat.save();
    if (this.chat.isEmpty) this.chat.draw();
    this.composer.focus();
  }

  #showTheme() {
    document.documentElement.dataset.theme = this.settings.theme;
  }

  #welcome() {
    if (this.chat.transcribes) return make("div.welcome", {}, make("h2", {}, "What was said?"), make("p", {}, "Record or drop a sound; its words are written here as they are heard."));
    const sees = this.composer.modalities.includes("image"), hears = this.composer.modalities.includes("audio");
    const hint = sees ? "Drop or paste an image, or ask something, for example:" : hears ? "Record or drop a sound, or ask something, for example:" : "Ask something, for example:";
    return make("div.welcome", {}, make("h2", {}, "What shall we write?"), make("p", {}, hint),
      make("div.examples", {}, ...EXAMPLES.map((text) => make("button", { type: "button", onclick: () => this.composer.send(text) }, text))));
  }

  showHelp() {
    showKeys("Keyboard shortcuts", KEYS.map(([keys, , what]) => [keys, what]));
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.isComposing || document.querySelector("dialog[open]")) return;
    const isTyping = event.target instanceof Element && event.target.matches("input, textarea, select, [contenteditable]");
    if (event.key === "Escape") { this.#escape(); return; }
    if (event.altKey && !event.ctrlKey && !event.metaKey && KEYS.some(([, code]) => code && code === event.code)) {
      event.preventDefault();
      this.#shortcut(event.code);
    } else if (!isTyping && !event.ctrlKey && !event.metaKey && !event.altKey && (event.key === "/" || event.key === "?")) {
      event.preventDefault();
      if (event.key === "/") this.composer.focus(); else this.showHelp();
    }
  }

  #escape() {
    if (this.chat.running) this.chat.stop();
    else if (!this.panel.element.hidden) this.panel.toggle(false);
    else if (!this.sidebar.element.hidden && this.sidebar.isNarrow.matches) this.sidebar.toggle(false);
    else this.composer.focus();
  }

  /** @param {string} code */
  #shortcut(code) {
    const messages = path(this.chat.conversation);
    const question = messages.findLast((each) => each.role === "user"), answer = messages.findLast((each) => each.role === "assistant");
    switch (code) {
      case "KeyN": this.sidebar.startNew(); break;
      case "KeyK": this.sidebar.focusSearch(); break;
      case "ArrowUp": this.sidebar.step(-1); break;
      case "ArrowDown": this.sidebar.step(1); break;
      case "KeyB": this.sidebar.toggle(); break;
      case "KeyS": this.panel.toggle(); break;
      case "KeyM": this.model.focus(); break;
      case "KeyV": this.tabs.next(); break;
      case "KeyE": if (question) this.chat.edit(question); break;
      case "KeyR": if (answer) this.chat.regenerate(answer); break;
      case "KeyG": if (answer && textOf(answer) && !answer.items) this.chat.continue(answer); break;
      case "KeyC": if (answer) copyText(textOf(answer)).then((done) => announce(done ? "Answer copied" : "The answer could not be copied")); break;
      default: break;
    }
  }
}

const page = new Page(await ConversationStore.open());
await page.connect();
