/** From a conversation to the body of a request: for the chat route, and for the Responses route where tools may be called. */

import { chatContent, responsesContent } from "./attachments.js";
import { textOf, thoughtOf } from "./conversations.js";
import { formFields } from "./samplers.js";

/**
 * @typedef {import("./conversations.js").Message} Message
 * @typedef {import("./conversations.js").Conversation} Conversation
 * @typedef {{fields: Record<string, any>, chances: string}} Options  Sampling fields, and how many alternatives per token are wanted.
 */

/** Labels of the MCP servers that are switched on. @param {Conversation} conversation @param {string[]} offered */
export function activeServers(conversation, offered) {
  return offered.filter((label) => conversation.servers[label] !== undefined);
}

/** Messages that the model is told: without questions that got no answer, the last one aside. @param {Message[]} messages */
function answered(messages) {
  return messages.filter((message, index) => {
    if (message.role === "assistant") return textOf(message) || message.items?.length;
    const next = messages[index + 1];
    return !next || next.role === "user" || textOf(next) || next.items?.length;
  });
}

/**
 * @param {Conversation} conversation
 * @param {Message[]} messages
 * @param {Options} options
 * @param {boolean} goesOn  Whether the last message is continued.
 */
export function chatBody(conversation, messages, { fields, chances }, goesOn) {
  const history = answered(messages).map((message) => {
    if (message.role === "user") return { role: "user", content: chatContent(textOf(message), message.files ?? []) };
    const thought = thoughtOf(message);
    return { role: "assistant", content: textOf(message), ...(thought && { reasoning: thought }) };
  });
  const system = conversation.system.trim();
  return {
    model: conversation.model,
    messages: system ? [{ role: "system", content: system }, ...history] : history,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...(chances !== "" && { logprobs: true, top_logprobs: Number(chances) }),
    ...(goesOn && { continue_final_message: true, add_generation_prompt: false }),
    ...formFields(conversation.form),
    ...fields,
  };
}

/**
 * @param {Conversation} conversation
 * @param {Message[]} messages
 * @param {Options} options
 * @param {string[]} servers
 * @param {object[]} more  Items behind the messages, as of an approval.
 */
export function responsesBody(conversation, messages, { fields, chances }, servers, more = []) {
  const input = answered(messages).flatMap((message) => {
    if (message.role === "user") return [{ type: "message", role: "user", content: responsesContent(textOf(message), message.files ?? []) }];
    if (message.items?.length) return message.items;
    return [{ type: "message", role: "assistant", content: [{ type: "output_text", text: textOf(message) }] }];
  });
  const { max_completion_tokens: most, reasoning_effort: effort, ...rest } = fields;
  return {
    model: conversation.model,
    input: [...input, ...more],
    store: false,
    ...(conversation.system.trim() && { instructions: conversation.system }),
    tools: servers.map((label) => ({ type: "mcp", server_label: label, require_approval: conversation.servers[label] ? "always" : "never" })),
    ...(chances !== "" && { include: ["message.output_text.logprobs"], top_logprobs: Number(chances) }),
    ...responsesForm(formFields(conversation.form)),
    ...(most !== undefined && { max_output_tokens: most }),
    ...(effort !== undefined && { reasoning: { effort } }),
    ...rest,
  };
}

/**
 * A recording for POST /v1/audio/transcriptions; what was written beside it is what was said before.
 * @param {Conversation} conversation
 * @param {Message} message
 * @param {import("./conversations.js").Attachment} file
 * @param {Record<string, any>} fields
 */
export function transcriptionForm(conversation, message, file, { temperature, language }) {
  const form = new FormData();
  form.set("model", conversation.model);
  form.set("file", bytesOf(file.url ?? ""), file.name);
  if (textOf(message).trim()) form.set("prompt", textOf(message).trim());
  if (temperature !== undefined) form.set("temperature", String(temperature));
  if (language !== undefined) form.set("language", language);
  return form;
}

/** The content of a data: address, which pages may not fetch. @param {string} url @returns {Blob} */
function bytesOf(url) {
  const [head, data] = url.split(",", 2);
  return new Blob([Uint8Array.from(atob(data), (char) => char.charCodeAt(0))], { type: head.slice("data:".length).split(";")[0] });
}

/** A form as the Responses route spells it. @param {Record<string, any>} fields */
function responsesForm({ response_format: format, ...rest }) {
  if (!format) return rest;
  return { ...rest, text: { format: format.type === "json_schema" ? { type: "json_schema", ...format.json_schema } : format } };
}
