/** One message as it is shown: its parts, its figures, and what can be done with it. */

import { chancesView } from "./chances_view.js";
import { siblings, textOf } from "./conversations.js";
import { copyText, flashDone, icon, iconButton, make } from "./dom.js";
import { jsonView } from "./json_view.js";
import { MarkdownView } from "./markdown.js";

/**
 * @typedef {import("./conversations.js").Message} Message
 * @typedef {import("./conversations.js").Conversation} Conversation
 * @typedef {{edit: (message: Message) => void, regenerate: (message: Message) => void, continue: (message: Message) => void,
 *   fork: (message: Message) => void, remove: (message: Message) => void, show: (message: Message) => void,
 *   approve: (message: Message, part: any, approves: boolean) => void}} Actions
 */

export class MessageView {
  /** @param {Conversation} conversation @param {Message} message @param {Actions} actions */
  constructor(conversation, message, actions) {
    this.conversation = conversation;
    this.message = message;
    this.actions = actions;
    this.showsChances = false;
    /** @type {{type: string, element: HTMLElement, update: (part: any, isWhole: boolean) => void}[]} */
    this.parts = [];
    this.body = make("div.body");
    this.figures = make("div.figures");
    this.foot = make("div.foot");
    const name = message.role === "user" ? "You" : "Answer";
    this.element = make(`article.message.${message.role}`, { "aria-label": name, tabindex: "-1" }, files(message), this.body, this.foot);
    this.element.dataset.id = message.id;
  }

  /** Draw what there is. @param {boolean} isWhole  Whether nothing will follow. */
  update(isWhole) {
    const { message } = this;
    this.element.setAttribute("aria-busy", String(!isWhole));
    if (message.role === "user") this.body.textContent = textOf(message);
    else if (this.showsChances && message.chances) this.body.replaceChildren(chancesView(message.chances));
    else this.#updateParts(isWhole);
    this.body.hidden = message.role === "user" && !this.body.textContent;
    if (isWhole) {
      this.#drawError();
      this.updateFigures();
      this.#drawFoot();
    }
  }

  #updateParts(isWhole) {
    const { parts } = this.message;
    if (this.parts.length > parts.length || this.body.querySelector(".chances, .waiting")) {
      this.parts = [];
      this.body.replaceChildren();
    }
    parts.forEach((part, index) => {
      const isLast = index === parts.length - 1;
      if (this.parts[index]?.type !== part.type) {
        const made = part.type === "thought" ? thoughtPart() : part.type === "call" ? callPart(this) : textPart();
        if (this.parts[index]) this.parts[index].element.replaceWith(made.element); else this.body.append(made.element);
        this.parts[index] = { type: part.type, ...made };
      }
      if (isLast || isWhole || index >= parts.length - 2 || part.type === "call") this.parts[index].update(part, isWhole || !isLast);
    });
    if (!parts.length && !isWhole) this.body.replaceChildren(make("div.waiting", { role: "img", "aria-label": "Waiting for the answer" }, make("i"), make("i"), make("i")));
  }

  #drawError() {
    this.element.querySelector(".error")?.remove();
    const { error } = this.message;
    this.element.classList.toggle("failed", Boolean(error));
    if (error) this.body.after(make("div.error", { role: "alert" }, error));
  }

  /** Figures beneath the answer. */
  updateFigures() {
    const { figures = {}, note, model } = this.message;
    const parts = [];
    if (figures.first !== undefined) parts.push(["first token", milliseconds(figures.first)]);
    if (figures.rate !== undefined) parts.push(["", `${figures.rate.toFixed(1)} tokens/s`]);
    if (figures.tokens) parts.push(["", `${figures.tokens} tokens`]);
    if (figures.cached) parts.push(["", `${figures.cached} of ${figures.prompt} prompt tokens cached`]);
    if (note) parts.push(["", note]);
    if (model && this.message.role === "assistant") parts.push(["", model]);
    this.figures.replaceChildren(...parts.map(([label, value]) => make("span", {}, label && `${label} `, value)));
    if (!this.figures.isConnected && this.message.role === "assistant") this.foot.append(this.figures);
  }

  #drawFoot() {
    const { message, actions, conversation } = this;
    const buttons = [];
    const all = siblings(conversation, message);
    if (all.length > 1) buttons.push(this.#branches(all));
    if (textOf(message)) {
      const copy = iconButton("copy", "Copy", async () => { if (await copyText(textOf(message))) flashDone(copy, "copy"); });
      copy.classList.add("copy");
      buttons.push(copy);
    }
    buttons.push(iconButton("edit", "Edit", () => actions.edit(message)));
    if (message.role === "assistant") {
      buttons.push(iconButton("redo", "Regenerate", () => actions.regenerate(message)));
      if (textOf(message) && !message.items && message.parts.at(-1)?.type === "text") buttons.push(iconButton("forward", "Continue", () => actions.continue(message)));
      if (message.chances?.length) buttons.push(this.#chancesButton());
    }
    buttons.push(iconButton("branch", "Branch into a new chat", () => actions.fork(message)));
    buttons.push(iconButton("trash", "Delete", () => actions.remove(message)));
    const bar = make("div.actions", { role: "toolbar", "aria-label": "Message" }, ...buttons);
    this.foot.replaceChildren(bar, ...(message.role === "assistant" ? [this.figures] : []));
  }

  #branches(all) {
    const place = all.indexOf(this.message);
    const step = (by) => () => this.actions.show(all[place + by]);
    return make("span.branches", { role: "group", "aria-label": "Versions" },
      iconButton("left", "Previous version", step(-1), { disabled: place === 0 }),
      make("span", {}, `${place + 1}/${all.length}`),
      iconButton("right", "Next version", step(1), { disabled: place === all.length - 1 }));
  }

  #chancesButton() {
    const button = iconButton("tokens", "Token probabilities", () => {
      this.showsChances = !this.showsChances;
      button.setAttribute("aria-pressed", String(this.showsChances));
      this.parts = [];
      this.body.replaceChildren();
      this.update(true);
      this.element.querySelector("[aria-pressed]")?.focus();
    }, { "aria-pressed": String(this.showsChances) });
    return button;
  }
}

/** @param {Message} message */
function files(message) {
  if (!message.files?.length) return null;
  return make("div.files", {}, ...message.files.map((file) => fileView(file)));
}

/** @param {import("./conversations.js").Attachment} file */
export function fileView(file) {
  if (file.kind === "image") return make("figure.file.image", {}, make("img", { src: file.url, alt: file.name }));
  if (file.kind === "audio") return make("figure.file", {}, make("audio", { controls: true, src: file.url, title: file.name }));
  if (file.kind === "video") return make("figure.file", {}, make("video", { controls: true, src: file.url, title: file.name }));
  return make("figure.file.text", {}, icon("file"), make("span", {}, file.name), make("small", {}, `${(file.text ?? "").length} characters`));
}

function textPart() {
  const view = new MarkdownView(), element = make("div.text", {}, view.element);
  return {
    element,
    update(part, isWhole) {
      const tree = isWhole ? jsonView(part.text) : null;
      if (tree) { element.replaceChildren(tree); return; }
      if (view.element.parentNode !== element) element.replaceChildren(view.element);
      const isJson = /^\s*(?:\{\s*"|\[\s*[[{"])/.test(part.text);
      view.show(isJson ? `\`\`\`\`json\n${part.text}` : part.text, isWhole && !isJson);
    },
  };
}

function thoughtPart() {
  const title = make("span", {}, "Thinking"), view = new MarkdownView();
  const element = make("details.thought", {}, make("summary", {}, title), view.element);
  let wasWhole = null, touched = false;
  element.firstElementChild.addEventListener("click", () => { touched = true; });
  return {
    element,
    update(part, isWhole) {
      view.show(part.text, isWhole);
      title.textContent = isWhole ? `Thought for ${duration(part.seconds)}` : `Thinking, ${duration(part.seconds)}`;
      if (wasWhole !== isWhole && !touched) element.open = !isWhole;  // folded when the answer begins
      wasWhole = isWhole;
    },
  };
}

/** @param {MessageView} owner */
function callPart(owner) {
  const name = make("code"), server = make("span.server"), state = make("span.state"), content = make("div.content");
  const element = make("details.tool-call", {}, make("summary", {}, icon("tool"), name, server, state), content);
  let shown = "";
  return {
    element,
    update(part, isWhole) {
      const key = JSON.stringify([part, isWhole]);
      if (key === shown) return;
      shown = key;
      name.textContent = part.name || "…";
      server.textContent = part.server ? `of ${part.server}` : "";
      state.textContent = part.error ? "failed" : { waiting: "waits for approval", completed: "done", called: "called", failed: "failed", refused: "refused" }[part.status] ?? (isWhole ? "ended early" : "running…");
      element.classList.toggle("failed", Boolean(part.error));
      const sections = [section("Arguments", part.arguments || "{}")];
      if (part.output !== undefined) sections.push(section("Result", part.output));
      if (part.error) sections.push(section("Error", part.error));
      if (part.status === "waiting" && isWhole) sections.push(approval(owner, part));
      if (part.status === "waiting") element.open = true;
      content.replaceChildren(...sections);
    },
  };
}

function section(label, text) {
  return make("section", {}, make("h4", {}, label), jsonView(text) ?? make("pre", { tabindex: "0" }, text));
}

/** @param {MessageView} owner @param {any} part */
function approval(owner, part) {
  const answer = (approves) => () => owner.actions.approve(owner.message, part, approves);
  return make("div.approval", {}, "The model wants to call this tool. ",
    make("button.primary", { type: "button", onclick: answer(true) }, "Allow"),
    make("button", { type: "button", onclick: answer(false) }, "Refuse"));
}

/** @param {number} value */
function milliseconds(value) {
  return value < 10_000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
}

/** @param {number} seconds */
function duration(seconds) {
  return seconds < 60 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}
