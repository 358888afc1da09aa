/** Requests to the server that the page came from. */

const KEY = "quire-key";

/** An answer of the server that is no success. */
export class ServerError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The API key, kept in this tab only; an address may bring it as `?key=`. */
export function apiKey() {
  return sessionStorage.getItem(KEY) ?? new URLSearchParams(location.search).get("key") ?? "";
}

/** @param {string} key */
export function setApiKey(key) {
  sessionStorage.setItem(KEY, key);
}

/**
 * @typedef {{id: string, parent: string|null, input_modalities?: string[], tasks?: string[], max_model_len?: number, pooling_tasks?: string[]}} ModelCard
 * @typedef {{name: string, whole: boolean, default: number|null, low: number, high: number, above: boolean}} SamplingNumber
 * @typedef {{sampling: SamplingNumber[], defaults: Record<string, number>, mcp_servers: string[], max_logprobs: number}} ChatSettings
 */

/** @returns {Promise<ModelCard[]>} */
export async function fetchModels() {
  return (await (await ask("v1/models")).json()).data;
}

/** @returns {Promise<ChatSettings>} */
export async function fetchChatSettings() {
  return (await ask("chat_settings")).json();
}

/**
 * @param {string} path  Relative, so that the page works below any prefix.
 * @param {RequestInit} [options]
 */
async function ask(path, options = {}) {
  const headers = new Headers(typeof options.body === "string" ? { "Content-Type": "application/json" } : {});
  if (apiKey()) headers.set("Authorization", `Bearer ${apiKey()}`);
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* the status has to do */ }
  throw new ServerError(response.status, message);
}

/**
 * Events of a streamed answer, as they come.
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<any>}
 */
export async function* streamEvents(path, body, signal) {
  yield* eventsOf(await ask(path, { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal }));
}

/**
 * What is said in a recording, as it is heard: chunks like those of a chat.
 * @param {FormData} form  Of POST /v1/audio/transcriptions.
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<any>}
 */
export async function* streamTranscript(form, signal) {
  form.set("stream", "true");
  yield* eventsOf(await ask("v1/audio/transcriptions", { method: "POST", body: form, signal }));
}

/**
 * What the engines do, until the signal.
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<any>}
 */
export async function* watchEngine(signal) {
  yield* eventsOf(await ask("v1/engine/events", { signal }));
}

/** Why a request took as long as it did. @param {string} id @returns {Promise<any>} */
export async function fetchExplanation(id) {
  return (await ask(`v1/requests/${encodeURIComponent(id)}/explain`)).json();
}

/** @param {Response} response @returns {AsyncGenerator<any>} */
async function* eventsOf(response) {
  const reader = /** @type {ReadableStream} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      const events = buffer.split("\n\n");
      buffer = /** @type {string} */ (events.pop());
      for (const event of events) {
        const line = event.split("\n").find((each) => each.startsWith("data: "));
        if (line === undefined || line === "data: [DONE]") continue;
        const data = JSON.parse(line.slice(6));
        const error = data.type === "error" ? data : data.error;
        if (error && typeof error === "object") throw new ServerError(error.code ?? 500, error.message ?? data.message ?? "the server failed");
        yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
