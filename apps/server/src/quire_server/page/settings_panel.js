/** The panel of settings: those of this chat, and those of the page. */

import { apiKey, setApiKey } from "./api.js";
import { byId, iconButton, make } from "./dom.js";
import { FORMS, GROUPS } from "./samplers.js";

/** @typedef {import("./samplers.js").Field} Field */

export class SettingsPanel {
  /**
   * @param {import("./chat.js").Chat} chat
   * @param {import("./settings.js").Settings} settings
   * @param {() => void} reconnect
   */
  constructor(chat, settings, reconnect) {
    this.chat = chat;
    this.settings = settings;
    this.reconnect = reconnect;
    this.element = byId("settings");
    this.content = make("div.content");
    this.element.append(make("header", {}, make("h2", {}, "Settings"), iconButton("close", "Close settings", () => this.toggle(false), { id: "close-settings" })), this.content);
    this.shownFor = "";
    chat.addEventListener("change", () => { if (this.shownFor !== chat.conversation.id) this.draw(); });
  }

  /** @param {boolean} [isShown] */
  toggle(isShown = this.element.hidden) {
    if (isShown) this.draw();
    const had = this.element.contains(document.activeElement);
    this.element.hidden = !isShown;
    byId("show-settings").setAttribute("aria-expanded", String(isShown));
    if (isShown) byId("system").focus();
    else if (had) byId("show-settings").focus();
  }

  /** Ask for a key. */
  showKey() {
    this.toggle(true);
    byId("key").focus();
  }

  draw() {
    this.shownFor = this.chat.conversation.id;
    const open = new Set([...this.content.querySelectorAll("details[open]")].map((each) => each.dataset.group));
    this.content.replaceChildren(
      this.#prompt(), this.#presets(),
      ...GROUPS.map((group) => this.#group(group, open.has(group) || (group === "Sampling" && !this.wasDrawn))),
      this.#form(), this.#servers(), this.#page());
    this.wasDrawn = true;
  }

  #prompt() {
    const { conversation } = this.chat, { prompts } = this.settings;
    const box = make("textarea", { id: "system", rows: 3, value: conversation.system, placeholder: "Who the model is, and how it answers" });
    box.addEventListener("input", () => { conversation.system = box.value; });
    box.addEventListener("change", () => { conversation.system = box.value; this.chat.save(); });
    const choice = select("prompts", "Saved system prompts", [["", "Saved prompts…"], ...Object.keys(prompts).map((name) => [name, name])], "", (name) => {
      if (!name) return;
      conversation.system = prompts[name];
      this.chat.save();
      this.draw();
      byId("prompts").value = name;
    });
    const save = make("button", { id: "save-prompt", type: "button", onclick: () => {
      const name = box.value.trim().split("\n")[0].slice(0, 40);
      if (name) { this.settings.change({ prompts: { ...prompts, [name]: box.value } }); this.draw(); }
    } }, "Save");
    const forget = make("button", { id: "forget-prompt", type: "button", onclick: () => {
      const rest = { ...prompts };
      delete rest[byId("prompts").value];
      this.settings.change({ prompts: rest });
      this.draw();
    } }, "Forget");
    return make("section", {}, labelled("System prompt of this chat", box), make("div.row", {}, choice, save, forget));
  }

  #presets() {
    const { settings } = this;
    const names = Object.keys(settings.allPresets);
    const choice = select("preset", "Preset", [...(settings.preset ? [] : [["", "Own values"]]), ...names.map((name) => [name, name])], settings.preset, (name) => {
      settings.change({ values: { ...settings.allPresets[name] } });
      this.draw();
    });
    const name = make("input", { id: "preset-name", placeholder: "Name", "aria-label": "Name of a new preset", maxLength: 60 });
    const save = make("button", { id: "save-preset", type: "button", onclick: () => {
      if (!name.value.trim()) { name.focus(); return; }
      settings.change({ presets: { ...settings.presets, [name.value.trim()]: { ...settings.typed } } });
      this.draw();
    } }, "Save");
    const forget = make("button", { id: "forget-preset", type: "button", disabled: !Object.hasOwn(settings.presets, settings.preset), onclick: () => {
      const rest = { ...settings.presets };
      delete rest[settings.preset];
      settings.change({ presets: rest });
      this.draw();
    } }, "Forget");
    const reset = make("button", { id: "reset", type: "button", onclick: () => { settings.change({ values: null }); this.draw(); } }, "Reset");
    return make("section", {}, make("h3", {}, "Presets"), make("div.row", {}, choice, forget, reset), make("div.row", {}, name, save));
  }

  #group(group, isOpen) {
    const fields = this.settings.fields.filter((field) => field.group === group);
    const set = fields.filter((field) => this.settings.typed[field.name] !== undefined).length;
    const details = make("details", { open: isOpen }, make("summary", {}, group, set ? make("span.count", {}, `${set} set`) : null), make("div.fields", {}, ...fields.map((field) => this.#field(field))));
    details.dataset.group = group;
    return details;
  }

  /** @param {Field} field */
  #field(field) {
    const { name, label, help, kind } = field, value = this.settings.typed[name] ?? "";
    const change = (text) => this.settings.setField(name, text);
    const [type, ...choices] = kind.split(" ");
    if (type === "switch") {
      const box = make("input", { id: name, type: "checkbox", checked: value === "true", onchange: (event) => change(event.target.checked ? "true" : "") });
      return make("label.switch", {}, box, label, help && make("small", {}, help));
    }
    if (type === "choice") return labelled(label, select(name, null, [["", "As the model does"], ...choices.map((each) => [each, each])], value, change), help);
    if (type === "lines" || type === "json") return labelled(label, make("textarea", { id: name, rows: 2, value, spellcheck: false, onchange: (event) => change(event.target.value) }), help, "wide");
    const numeric = type === "whole" || type === "number";
    const box = make("input", { id: name, type: numeric ? "number" : "text", value, placeholder: field.placeholder ?? "", onchange: (event) => change(event.target.value) });
    if (numeric) Object.assign(box, { step: type === "whole" ? "1" : "any" });
    if (field.low !== undefined && Math.abs(field.low) < 1e6) box.min = String(field.low);
    if (field.high !== undefined && field.high < 1e6) box.max = String(field.high);
    return labelled(label, box, help, type === "ids" ? "wide" : "");
  }

  #form() {
    const { conversation } = this.chat;
    const example = (kind) => FORMS.find(([name]) => name === kind)?.[2] ?? "";
    const box = make("textarea", { id: "form-text", rows: 5, value: conversation.form.text, placeholder: example(conversation.form.kind), spellcheck: false, hidden: !example(conversation.form.kind), "aria-label": "Schema, pattern or grammar" });
    box.addEventListener("input", () => { conversation.form = { ...conversation.form, text: box.value }; });
    box.addEventListener("change", () => this.chat.save());
    const choice = select("form-kind", null, FORMS.map(([name, label]) => [name, label]), conversation.form.kind, (kind) => {
      conversation.form = { ...conversation.form, kind };
      Object.assign(box, { hidden: !example(kind), placeholder: example(kind) });
      this.chat.save();
    });
    return make("section", {}, make("h3", {}, "Form of the answers"), labelled("In this chat", choice), box);
  }

  #servers() {
    const { conversation } = this.chat, labels = this.settings.offered.mcp_servers;
    if (!labels.length) return "";
    const rows = labels.map((label) => {
      const isOn = conversation.servers[label] !== undefined;
      const asks = make("input", { id: `asks-${label}`, type: "checkbox", checked: conversation.servers[label] !== false, disabled: !isOn, onchange: () => this.#setServer(label, asks.checked) });
      const on = make("input", { id: `server-${label}`, type: "checkbox", checked: isOn, onchange: () => { asks.disabled = !on.checked; this.#setServer(label, on.checked ? asks.checked : undefined); } });
      return make("div.server", {}, make("label.switch", {}, on, label), make("label.switch", {}, asks, "ask before each call"));
    });
    return make("section", {}, make("h3", {}, "Tools (MCP servers) of this chat"), ...rows);
  }

  #setServer(label, value) {
    const servers = { ...this.chat.conversation.servers, [label]: value };
    if (value === undefined) delete servers[label];
    this.chat.conversation.servers = servers;
    this.chat.save();
  }

  #page() {
    const { settings } = this;
    const theme = select("theme", null, [["auto", "As the system"], ["light", "Light"], ["dark", "Dark"]], settings.theme, (value) => settings.change({ theme: value }));
    const chances = make("input", { id: "chances", type: "number", min: 0, max: Math.max(0, settings.offered.max_logprobs), value: settings.chances, placeholder: "none", onchange: (event) => settings.change({ chances: event.target.value.trim() }) });
    const key = make("input", { id: "key", type: "password", autocomplete: "off", value: apiKey(), onchange: () => { setApiKey(key.value); this.reconnect(); } });
    return make("section", {}, make("h3", {}, "Page"), make("div.fields", {},
      labelled("Colours", theme), labelled("Token probabilities", chances, "Alternatives per token, to be seen in the answers that follow"), labelled("API key", key, "Kept in this tab only", "wide")));
  }
}

/** @param {string} label @param {HTMLElement} control @param {string} [help] @param {string} [kind] */
function labelled(label, control, help = "", kind = "") {
  return make(kind ? `label.${kind}` : "label", {}, make("span", {}, label), control, help && make("small", {}, help));
}

/** @param {string} id @param {string|null} label @param {string[][]} options @param {string} value @param {(value: string) => void} change */
function select(id, label, options, value, change) {
  const element = make("select", { id, "aria-label": label, onchange: () => change(element.value) }, ...options.map(([name, text]) => make("option", { value: name }, text)));
  element.value = value;
  return element;
}
