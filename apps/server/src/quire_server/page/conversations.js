/**
 * Conversations, kept in this browser: a tree of messages each, so that an edit or a second answer loses nothing.
 *
 * @typedef {{kind: "image"|"audio"|"video"|"text", name: string, url?: string, text?: string}} Attachment
 * @typedef {{type: "text", text: string}
 *   | {type: "thought", text: string, seconds: number}
 *   | {type: "call", name: string, server?: string, arguments: string, output?: string, error?: string, status: string, approval?: string}} Part
 * @typedef {{token: string, logprob: number, top: {token: string, logprob: number}[]}} TokenChance
 * @typedef {{first?: number, rate?: number, tokens?: number, prompt?: number, cached?: number}} Figures  Milliseconds, tokens/s, counts.
 * @typedef {{id: string, parent: string, role: "user"|"assistant", time: number, parts: Part[], files?: Attachment[], model?: string,
 *   figures?: Figures, chances?: TokenChance[], items?: object[], error?: string, note?: string}} Message
 * @typedef {{id: string, title: string, named?: boolean, created: number, updated: number, messages: Record<string, Message>,
 *   selected: Record<string, string>, model?: string, system: string, form: {kind: string, text: string}, servers: Record<string, boolean>}} Conversation
 */

const DATABASE = "quire";
const STORE = "conversations";
const FORMAT = "quire-conversations";
export const ROOT = "root";

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** The conversations of this browser. */
export class ConversationStore {
  /** @param {IDBDatabase|null} database  null keeps them for as long as the page is open. */
  constructor(database) {
    this.database = database;
    /** @type {Map<string, Conversation>} */
    this.kept = new Map();
  }

  /** Open it, with everything that is kept. */
  static async open() {
    let database = null;
    try {
      const request = indexedDB.open(DATABASE, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
      database = await settled(request);
    } catch { /* a private window may have none */ }
    const store = new ConversationStore(database);
    if (database) for (const each of await settled(database.transaction(STORE).objectStore(STORE).getAll())) store.kept.set(each.id, each);
    return store;
  }

  /** @returns {Conversation[]} The latest first. */
  all() {
    return [...this.kept.values()].sort((one, other) => other.updated - one.updated);
  }

  /** Those in whose title or text all words stand. @param {string} query */
  search(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    return this.all().filter((each) => {
      const text = `${each.title}\n${Object.values(each.messages).map(textOf).join("\n")}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
  }

  /** @param {Conversation} conversation */
  async save(conversation) {
    this.kept.set(conversation.id, conversation);
    if (this.database) await settled(this.database.transaction(STORE, "readwrite").objectStore(STORE).put(conversation));
  }

  /** @param {string} id */
  async remove(id) {
    this.kept.delete(id);
    if (this.database) await settled(this.database.transaction(STORE, "readwrite").objectStore(STORE).delete(id));
  }

  async clear() {
    for (const id of [...this.kept.keys()]) await this.remove(id);
  }

  /** @param {Conversation[]} conversations @returns {string} JSON that `importText` reads. */
  static exportText(conversations) {
    return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
  }

  /**
   * Add exported conversations. One that is here already, and newer, stays.
   * @param {string} text
   * @returns {Promise<number>} How many were added.
   * @throws {Error} The text is no export.
   */
  async importText(text) {
    let data;
    try {
      data = JSON.parse(text);
    } catch {
      throw new Error("the file is no JSON");
    }
    if (data?.format !== FORMAT || !Array.isArray(data.conversations)) throw new Error("the file holds no exported conversations");
    const found = data.conversations.map(checked);
    let count = 0;
    for (const conversation of found) {
      const here = this.kept.get(conversation.id);
      if (here && here.updated >= conversation.updated) continue;
      await this.save(conversation);
      count += 1;
    }
    return count;
  }
}

/** @param {any} value @returns {Conversation} @throws {Error} It is none. */
function checked(value) {
  const isText = (each) => typeof each === "string";
  const messages = Object.values(value?.messages ?? {});
  const isWhole = isText(value?.id) && isText(value.title) && Number.isFinite(value.updated) && messages.every((each) =>
    isText(each?.id) && isText(each.parent) && (each.parent === ROOT || Object.hasOwn(value.messages, each.parent)) &&
    (each.role === "user" || each.role === "assistant") && Array.isArray(each.parts) && each.parts.every((part) => isText(part?.type)));
  if (!isWhole) throw new Error(`a conversation in the file is damaged: ${String(value?.title ?? "without a title").slice(0, 80)}`);
  const fresh = newConversation();
  return {
    ...fresh, id: value.id, title: value.title, ...(value.named && { named: true }), created: Number(value.created) || value.updated, updated: value.updated,
    messages: value.messages, selected: value.selected ?? {}, model: value.model, system: String(value.system ?? ""),
    form: value.form ?? fresh.form, servers: value.servers ?? {},
  };
}

/** @returns {string} */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @param {Partial<Conversation>} [values] @returns {Conversation} */
export function newConversation(values = {}) {
  const now = Date.now();
  return { id: newId(), title: "New chat", created: now, updated: now, messages: {}, selected: {}, system: "", form: { kind: "", text: "" }, servers: {}, ...values };
}

/** Messages from the first to the last, along the branches that are shown. @param {Conversation} conversation @returns {Message[]} */
export function path(conversation) {
  const messages = [];
  for (let id = conversation.selected[ROOT]; id && conversation.messages[id] && messages.length < 100_000; id = conversation.selected[id]) {
    messages.push(conversation.messages[id]);
  }
  return messages;
}

/** Messages that stand in one place, in the order in which they were made. @param {Conversation} conversation @param {Message} message */
export function siblings(conversation, message) {
  return Object.values(conversation.messages).filter((each) => each.parent === message.parent).sort((one, other) => one.time - other.time);
}

/** Add a message and show it. @param {Conversation} conversation @param {Omit<Message, "id"|"time">} values @returns {Message} */
export function addMessage(conversation, values) {
  const times = Object.values(conversation.messages).map((each) => each.time);
  const message = { ...values, id: newId(), time: Math.max(Date.now(), ...times.slice(-1).map((time) => time + 1)) };
  conversation.messages[message.id] = message;
  conversation.selected[message.parent] = message.id;
  conversation.updated = Date.now();
  return message;
}

/** Remove a message and all that follows it. @param {Conversation} conversation @param {Message} message */
export function removeMessage(conversation, message) {
  const others = siblings(conversation, message).filter((each) => each !== message);
  const doomed = [message.id];
  for (let id = doomed.pop(); id !== undefined; id = doomed.pop()) {
    doomed.push(...Object.values(conversation.messages).filter((each) => each.parent === id).map((each) => each.id));
    delete conversation.messages[id];
    delete conversation.selected[id];
  }
  if (conversation.selected[message.parent] !== message.id) return;
  if (others.length) conversation.selected[message.parent] = others.at(-1).id;
  else delete conversation.selected[message.parent];
}

/** @param {Message} message @returns {string} What was said, without thoughts and calls. */
export function textOf(message) {
  return message.parts.filter((part) => part.type === "text").map((part) => part.text).join("");
}

/** @param {Message} message @returns {string} */
export function thoughtOf(message) {
  return message.parts.filter((part) => part.type === "thought").map((part) => part.text).join("\n\n");
}

/** A title from what was asked first. @param {string} text @param {Attachment[]} files */
export function titleOf(text, files) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ") || files[0]?.name || "New chat";
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line;
}

/** A copy of what is shown, up to a message, as a conversation of its own. @param {Conversation} conversation @param {Message} last */
export function forked(conversation, last) {
  const shown = path(conversation);
  const kept = shown.slice(0, shown.indexOf(last) + 1);
  const { model, system, form, servers } = structuredClone(conversation);
  const copy = newConversation({ title: `${conversation.title} (branch)`, named: true, model, system, form, servers });
  let parent = ROOT;
  for (const message of kept) parent = addMessage(copy, { ...structuredClone(message), parent }).id;
  return copy;
}
