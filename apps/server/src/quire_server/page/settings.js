/** What is set on the page, beside what belongs to one chat: sampling, presets, saved system prompts, looks. */

import { PRESETS, fieldsOf, requestFields } from "./samplers.js";

const KEPT = "quire-settings";
const NOTHING = { sampling: [], defaults: {}, mcp_servers: [], max_logprobs: 0 };

export class Settings extends EventTarget {
  constructor() {
    super();
    /** @type {import("./api.js").ChatSettings} */
    this.offered = NOTHING;
    /** @type {Record<string, string>|null} Name of a field -> what is typed; null until something was set. */
    this.values = null;
    /** @type {Record<string, Record<string, string>>} */
    this.presets = {};
    /** @type {Record<string, string>} */
    this.prompts = {};
    this.theme = "auto";
    /** Alternatives per token to ask for; "" for none. */
    this.chances = "";
    this.showsSidebar = true;
    try {
      const { values, presets, prompts, theme, chances, showsSidebar } = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
      Object.assign(this, { values: values ?? null, presets: presets ?? {}, prompts: prompts ?? {}, theme: theme ?? "auto", chances: chances ?? "", showsSidebar: showsSidebar ?? true });
    } catch { /* kept by another version */ }
  }

  get fields() {
    return fieldsOf(this.offered);
  }

  /** What is typed; where nothing was ever set and the model recommends nothing, the likeliest tokens are taken. */
  get typed() {
    return this.values ?? (this.offered.defaults.temperature === undefined ? PRESETS.Precise : {});
  }

  get allPresets() {
    return { ...PRESETS, ...this.presets };
  }

  /** Name of the preset that is set, "" for none. */
  get preset() {
    const same = (one, other) => JSON.stringify(Object.entries(one).sort()) === JSON.stringify(Object.entries(other).sort());
    return Object.entries(this.allPresets).find(([, values]) => same(values, this.typed))?.[0] ?? "";
  }

  /** @param {string} name @param {string} text */
  setField(name, text) {
    const values = { ...this.typed, [name]: text };
    if (!text.trim()) delete values[name];
    this.change({ values });
  }

  /** @param {Partial<Settings>} values */
  change(values) {
    Object.assign(this, values);
    const { values: typed, presets, prompts, theme, chances, showsSidebar } = this;
    try {
      localStorage.setItem(KEPT, JSON.stringify({ values: typed, presets, prompts, theme, chances, showsSidebar }));
    } catch { /* nothing can be kept here */ }
    this.dispatchEvent(new Event("change"));
  }

  /** Fields of a request. @throws {Error} Naming the field at fault. */
  request() {
    return requestFields(this.typed, this.fields);
  }
}
