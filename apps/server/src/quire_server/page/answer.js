/** One answer while it comes: events of the chat or the Responses route become parts of a message, and figures. */

const RATE_WINDOW_MS = 3000;

/** @typedef {import("./conversations.js").Message} Message */

export class Answer {
  /** @param {Message} message  Filled in place; what it holds already stays in front. */
  constructor(message) {
    this.message = message;
    this.started = performance.now();
    /** @type {number|null} */
    this.first = null;
    this.last = 0;
    this.tokens = 0;
    this.tokensBefore = message.figures?.tokens ?? 0;
    this.thoughtSince = 0;
    /** @type {string|null} */
    this.finish = null;
    /** @type {Map<string, any>} Id of an item of the Responses route -> its part. */
    this.calls = new Map();
    /** @type {[number, number][]} Time and count of tokens, of the last seconds. */
    this.counts = [];
    message.figures = {};
  }

  /** @param {any} chunk  Of POST /v1/chat/completions. */
  takeChunk(chunk) {
    if (chunk.usage) this.#takeUsage(chunk.usage);
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const { delta } = choice;
    if (delta.reasoning) this.#think(delta.reasoning);
    if (delta.content) this.#say(delta.content);
    for (const call of delta.tool_calls ?? []) this.#takeCallDelta(call);
    this.#takeChances(choice.logprobs?.content);
  }

  /** @param {any} event  Of POST /v1/responses. */
  takeEvent(event) {
    switch (event.type) {
      case "response.output_text.delta": this.#say(event.delta); this.#takeChances(event.logprobs); break;
      case "response.reasoning_text.delta": this.#think(event.delta); break;
      case "response.mcp_call_arguments.delta": this.#callOf(event.item_id).arguments += event.delta; this.#tick(1); break;
      case "response.output_item.added": this.#takeItem(event.item); break;
      case "response.output_item.done": this.#takeItem(event.item); break;
      case "response.completed": case "response.incomplete": case "response.failed": this.#takeResponse(event.response); break;
      default: break;
    }
  }

  #takeResponse(response) {
    this.message.items = [...(this.message.items ?? []), ...response.output.filter((item) => item.type !== "mcp_list_tools")];
    this.finish = response.incomplete_details?.reason === "max_output_tokens" ? "length" : "stop";
    if (response.usage) {
      const { input_tokens, output_tokens, input_tokens_details } = response.usage;
      this.#takeUsage({ prompt_tokens: input_tokens, completion_tokens: output_tokens, prompt_tokens_details: input_tokens_details });
    }
    if (response.error) throw new Error(response.error.message);
  }

  /** An item of a call: of a tool that ran, or that waits for approval. */
  #takeItem(item) {
    if (item.type !== "mcp_call" && item.type !== "mcp_approval_request") return;
    const asked = item.approval_request_id && this.message.parts.find((each) => each.type === "call" && each.approval === item.approval_request_id);
    if (asked) this.calls.set(item.id, asked);
    const part = this.#callOf(item.id);
    Object.assign(part, { name: item.name, server: item.server_label, arguments: item.arguments || part.arguments });
    if (item.type === "mcp_approval_request") Object.assign(part, { status: "waiting", approval: item.id });
    else part.status = item.status;
    if (item.output !== null && item.output !== undefined) part.output = String(item.output);
    if (item.error) part.error = item.error.content?.map((each) => each.text).join("\n") ?? String(item.error.message ?? item.error);
  }

  #callOf(id) {
    let part = this.calls.get(id);
    if (!part) {
      this.#endThought();
      part = { type: "call", name: "", arguments: "", status: "in_progress" };
      this.calls.set(id, part);
      this.message.parts.push(part);
    }
    return part;
  }

  #takeCallDelta(call) {
    const part = this.#callOf(`index ${call.index}`);
    if (call.function?.name) part.name = call.function.name;
    part.arguments += call.function?.arguments ?? "";
    part.status = "called";
    this.#tick(1);
  }

  #say(text) {
    this.#endThought();
    this.#part("text").text += text;
    this.#tick(1);
  }

  #think(text) {
    const part = this.#part("thought");
    if (!this.thoughtSince) this.thoughtSince = performance.now();
    part.text += text;
    this.#tick(1);
    part.seconds = (this.last - this.thoughtSince) / 1000;
  }

  #endThought() {
    const last = this.message.parts.at(-1);
    if (last?.type === "thought" && this.thoughtSince) last.seconds = (performance.now() - this.thoughtSince) / 1000;
    this.thoughtSince = 0;
  }

  /** The last part, if it is of this kind, else a new one. */
  #part(type) {
    const last = this.message.parts.at(-1);
    if (last?.type === type) return /** @type {any} */ (last);
    const part = type === "thought" ? { type, text: "", seconds: 0 } : { type, text: "" };
    this.message.parts.push(/** @type {any} */ (part));
    return part;
  }

  /** Something came. @param {number} atLeast  Tokens, where the server does not count them while it answers. */
  #tick(atLeast) {
    this.last = performance.now();
    if (this.first === null) this.first = this.last;
    if (!this.counted) this.tokens += atLeast;
    this.#figure();
  }

  #takeUsage(usage) {
    this.counted = true;
    this.tokens = usage.completion_tokens ?? this.tokens;
    this.message.figures.prompt = usage.prompt_tokens;
    this.message.figures.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    this.#figure();
  }

  /** Time of the first token, tokens, and their rate: of the last seconds while it comes, so that it is steady and true. */
  #figure() {
    const { figures } = this.message;
    figures.tokens = this.tokens + this.tokensBefore;
    if (this.first === null) return;
    figures.first = this.first - this.started;
    const now = this.last;
    this.counts.push([now, this.tokens]);
    while (this.counts.length > 2 && now - this.counts[0][0] > RATE_WINDOW_MS) this.counts.shift();
    const [since, before] = this.counts[0];
    if (now - since >= 250 && this.tokens > before) figures.rate = ((this.tokens - before) * 1000) / (now - since);
  }

  #takeChances(entries) {
    if (!entries?.length) return;
    this.message.chances ??= [];
    for (const { token, logprob, top_logprobs: top } of entries) {
      this.message.chances.push({ token, logprob, top: (top ?? []).map((each) => ({ token: each.token, logprob: each.logprob })) });
    }
  }

  /** Nothing follows: the rate is that of the whole answer. */
  end() {
    this.#endThought();
    const { figures } = this.message;
    figures.tokens = this.tokens + this.tokensBefore;
    const seconds = (this.last - (this.first ?? 0)) / 1000;
    if (this.first !== null && this.tokens > 1 && seconds > 0.05) figures.rate = (this.tokens - 1) / seconds;
  }
}
