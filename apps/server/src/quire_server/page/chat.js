/** The chat that is shown: asks, streams, stops, edits, branches. Knows the store and the server, and draws messages. */

import { ServerError, streamEvents, streamTranscript } from "./api.js";
import { Answer } from "./answer.js";
import { ROOT, addMessage, forked, newConversation, path, removeMessage, textOf, titleOf } from "./conversations.js";
import { announce, byId, iconButton, make } from "./dom.js";
import { MessageView } from "./message_view.js";
import { activeServers, chatBody, responsesBody, transcriptionForm } from "./requests.js";

const FIGURES_MS = 250;
const SAVE_MS = 2000;
const SLOW_FRAME_MS = 8;

/**
 * @typedef {import("./conversations.js").Message} Message
 * @typedef {import("./conversations.js").Conversation} Conversation
 * @typedef {import("./conversations.js").Attachment} Attachment
 */

/** Emits "change" when the conversation is another one or its name or time changes, and "running" when an answer begins or ends. */
export class Chat extends EventTarget {
  /**
   * @param {import("./conversations.js").ConversationStore} store
   * @param {import("./settings.js").Settings} settings
   */
  constructor(store, settings) {
    super();
    this.store = store;
    this.settings = settings;
    /** @type {Conversation} */
    this.conversation = newConversation();
    /** @type {Map<string, MessageView>} Id of a message -> its view, of those that are shown. */
    this.views = new Map();
    /** @type {AbortController|null} */
    this.running = null;
    /** The model writes what it hears, and nothing else. */
    this.transcribes = false;
    this.log = byId("log");
    this.follows = true;
    /** @type {() => Node} */
    this.welcome = () => make("div.welcome");
    this.toEnd = iconButton("down", "To the latest message", () => this.scrollToEnd(true), { id: "to-end", hidden: true });
    byId("chat-view").append(this.toEnd);
    this.log.addEventListener("scroll", () => this.#noteScroll());
    this.actions = {
      edit: (message) => this.edit(message),
      regenerate: (message) => this.regenerate(message),
      continue: (message) => this.continue(message),
      fork: (message) => this.fork(message),
      remove: (message) => this.remove(message),
      show: (message) => this.show(message),
      approve: (message, part, approves) => this.approve(message, part, approves),
    };
  }

  /** @param {Conversation} conversation */
  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.views.clear();
    this.draw();
    this.scrollToEnd(true);
    this.dispatchEvent(new Event("change"));
  }

  /** An empty one, with the same model. */
  openNew() {
    const model = this.conversation.model;
    this.open(newConversation(model ? { model } : {}));
  }

  get isEmpty() {
    return path(this.conversation).length === 0;
  }

  /** Keep the conversation as it is now. */
  async save() {
    const { conversation } = this;
    if (Object.keys(conversation.messages).length === 0) return;
    await this.store.save(conversation);
    this.dispatchEvent(new Event("change"));
  }

  /** Draw all messages that are shown; views of those that were shown before stay. */
  draw() {
    const messages = path(this.conversation);
    const views = messages.map((message) => {
      const before = this.views.get(message.id);
      const view = before?.message === message ? before : new MessageView(this.conversation, message, this.actions);
      view.update(view !== this.current);
      return view;
    });
    this.views = new Map(views.map((view) => [view.message.id, view]));
    this.log.replaceChildren(...(views.length ? views.map((view) => view.element) : [this.welcome()]));
  }

  /** @param {string} text @param {Attachment[]} files */
  async send(text, files) {
    if (this.running || !(text.trim() || files.length)) return;
    const { conversation } = this;
    const parent = path(conversation).at(-1)?.id ?? ROOT;
    if (parent === ROOT && !conversation.named) conversation.title = titleOf(text, files);
    addMessage(conversation, { parent, role: "user", parts: [{ type: "text", text }], ...(files.length && { files }) });
    await this.#answer();
  }

  /** Another answer to the same question. @param {Message} message */
  async regenerate(message) {
    if (this.running) return;
    delete this.conversation.selected[message.parent];
    await this.#answer(message.parent);
  }

  /** Let the model write on. @param {Message} message */
  async continue(message) {
    if (this.running) return;
    await this.#stream(message, path(this.conversation).slice(0, path(this.conversation).indexOf(message) + 1), true);
  }

  /** Allow or refuse a call, and let the model go on. @param {Message} message @param {any} part @param {boolean} approves */
  async approve(message, part, approves) {
    if (this.running) return;
    part.status = approves ? "called" : "refused";
    const more = [{ type: "mcp_approval_response", approval_request_id: part.approval, approve: approves }];
    const isLast = !message.parts.some((each) => each.type === "call" && each.status === "waiting");
    message.items = [...(message.items ?? []), ...more];
    if (!isLast) { this.draw(); return; }
    await this.#stream(message, path(this.conversation).slice(0, path(this.conversation).indexOf(message) + 1), true);
  }

  /** Change a message in a box in its place; the old version stays. @param {Message} message */
  edit(message) {
    const view = this.views.get(message.id);
    if (!view || this.running) return;
    const box = make("textarea", { value: textOf(message), rows: 3, "aria-label": "Edit the message" });
    const close = () => { this.views.delete(message.id); this.draw(); byId("prompt").focus(); };
    const save = () => this.#saveEdit(message, box.value, close);
    const isUser = message.role === "user";
    const buttons = make("div.buttons", {},
      make("button", { type: "button", onclick: close }, "Cancel"),
      make("button.primary", { type: "button", onclick: save }, isUser ? "Send" : "Save"));
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey || (isUser && !event.shiftKey)) && !event.isComposing) { event.preventDefault(); save(); }
    });
    view.body.hidden = false;
    view.body.replaceChildren(make("div.editor", {}, box, buttons));
    box.style.height = `${Math.min(box.scrollHeight + 4, 400)}px`;
    box.focus();
  }

  async #saveEdit(message, text, close) {
    if (text === textOf(message) || (!text.trim() && !message.files?.length)) { close(); return; }
    const { parent, role, files, model } = message;
    addMessage(this.conversation, { parent, role, parts: [{ type: "text", text }], ...(files && { files }), ...(model && { model }), ...(role === "assistant" && { note: "edited" }) });
    if (role === "user") { await this.#answer(); return; }
    this.draw();
    await this.save();
  }

  /** @param {Message} message */
  async fork(message) {
    if (this.running) return;
    this.open(forked(this.conversation, message));
    await this.save();
    announce("Branched into a new chat");
  }

  /** @param {Message} message */
  async remove(message) {
    if (this.running) return;
    removeMessage(this.conversation, message);
    this.draw();
    if (Object.keys(this.conversation.messages).length) await this.save();
    else { await this.store.remove(this.conversation.id); this.dispatchEvent(new Event("change")); }
  }

  /** Show another version of a message. @param {Message} message */
  async show(message) {
    if (this.running) return;
    this.conversation.selected[message.parent] = message.id;
    this.draw();
    this.views.get(message.id)?.element.focus();
    await this.save();
  }

  stop() {
    this.running?.abort();
  }

  /** @param {string} [parent]  The question; the last message if it is left out. */
  async #answer(parent) {
    const question = parent ?? path(this.conversation).at(-1).id;
    const messages = path(this.conversation);
    const message = addMessage(this.conversation, { parent: question, role: "assistant", parts: [], model: this.conversation.model });
    await this.#stream(message, messages, false);
  }

  /**
   * Ask, and fill a message with the answer.
   * @param {Message} message
   * @param {Message[]} history
   * @param {boolean} goesOn  Whether it has a beginning.
   */
  async #stream(message, history, goesOn) {
    const { conversation } = this;
    const controller = new AbortController();
    this.running = controller;
    delete message.error;
    message.note = "cut off";  // what is kept if this page closes now
    const answer = new Answer(message);
    this.current = this.views.get(message.id);
    this.draw();
    this.current = this.views.get(message.id);
    this.current.update(false);
    this.scrollToEnd(true);
    this.dispatchEvent(new Event("running"));
    const drawing = new Drawing(this, this.current, answer);
    try {
      for await (const [isEvent, data] of this.#events(conversation, history, goesOn, controller.signal)) {
        if (isEvent) answer.takeEvent(data); else answer.takeChunk(data);
        drawing.request();
      }
      message.note = { length: "stopped at the limit", error: "failed" }[answer.finish ?? ""];
    } catch (error) {
      if (controller.signal.aborted) message.note = "stopped";
      else { message.error = error.message; delete message.note; }
      if (error instanceof ServerError && error.status === 401) this.dispatchEvent(new Event("unauthorized"));
    }
    if (message.note === undefined) delete message.note;
    answer.end();
    drawing.end();
    this.current = undefined;
    if (this.running === controller) this.running = null;
    conversation.updated = Date.now();
    if (this.conversation === conversation) {
      this.draw();
      this.scrollToEnd(false);
    }
    this.dispatchEvent(new Event("running"));
    announce(message.error ? `Failed: ${message.error}` : `Answer: ${textOf(message).slice(0, 2000)}`);
    if (Object.hasOwn(conversation.messages, message.id)) await this.store.save(conversation);
    this.dispatchEvent(new Event("change"));
  }

  /** @returns {AsyncGenerator<[boolean, any]>} Whether it is of the Responses route, and an event. */
  async* #events(conversation, history, goesOn, signal) {
    const options = { fields: this.settings.request(), chances: this.settings.chances };
    if (this.transcribes) {
      const question = history.findLast((each) => each.role === "user");
      const sounds = question?.files?.filter((file) => file.kind === "audio") ?? [];
      if (!sounds.length) throw new Error("this model writes what it hears: record a sound, or attach one");
      for (const file of sounds) {
        for await (const chunk of streamTranscript(transcriptionForm(conversation, question, file, options.fields), signal)) yield [false, chunk];
      }
      return;
    }
    const servers = activeServers(conversation, this.settings.offered.mcp_servers);
    const waits = goesOn && history.at(-1)?.items?.length;
    if (servers.length || waits) {
      const body = responsesBody(conversation, history, options, servers);
      for await (const event of streamEvents("v1/responses", body, signal)) yield [true, event];
    } else {
      for await (const chunk of streamEvents("v1/chat/completions", chatBody(conversation, history, options, goesOn), signal)) yield [false, chunk];
    }
  }

  #noteScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    this.follows = scrollHeight - scrollTop - clientHeight < 80;
    this.toEnd.hidden = this.follows || this.isEmpty;
  }

  /** @param {boolean} always  Also where the user has scrolled away. */
  scrollToEnd(always) {
    if (always) this.follows = true;
    if (!this.follows) return;
    this.log.scrollTop = this.log.scrollHeight;
    this.toEnd.hidden = true;
  }
}

/** Draws an answer that comes: once per frame at most, and less often where drawing takes long. */
class Drawing {
  /** @param {Chat} chat @param {MessageView} view @param {Answer} answer */
  constructor(chat, view, answer) {
    this.chat = chat;
    this.view = view;
    this.answer = answer;
    this.isRequested = false;
    this.isOver = false;
    this.figuresAt = 0;
    this.savedAt = performance.now();
    this.pause = 0;
  }

  /** Something came. */
  request() {
    if (this.isRequested) return;
    this.isRequested = true;
    const frame = () => requestAnimationFrame(() => this.#draw());
    if (this.pause > 0) setTimeout(frame, this.pause); else frame();
  }

  #draw() {
    this.isRequested = false;
    if (this.isOver) return;
    const start = performance.now();
    this.view.update(false);
    if (start - this.figuresAt > FIGURES_MS) {
      this.figuresAt = start;
      this.view.updateFigures();
    }
    this.chat.scrollToEnd(false);
    const took = performance.now() - start;
    this.pause = took > SLOW_FRAME_MS ? Math.min(1000, 3 * took) : 0;
    if (start - this.savedAt > SAVE_MS) {
      this.savedAt = start;
      this.chat.store.save(this.chat.conversation).catch(() => {});
    }
  }

  end() {
    this.isOver = true;
  }
}
