/** Files that are sent with a message: pictures, sounds and videos for models that take them, texts for all. */

const MAX_TEXT_BYTES = 2 << 20;
const SAMPLE_RATE = 16000;

/** @typedef {import("./conversations.js").Attachment} Attachment */

/**
 * @param {File} file
 * @param {string[]} modalities  What the model takes.
 * @param {string} model
 * @returns {Promise<Attachment>}
 * @throws {Error} The model cannot take it.
 */
export async function attachmentOf(file, modalities, model) {
  const name = file.name || "pasted file";
  const kind = /** @type {"image"|"audio"|"video"} */ (/^(image|audio|video)\//.exec(file.type)?.[1]);
  if (kind && !(kind === "image" && file.type === "image/svg+xml")) {
    if (!modalities.includes(kind)) throw new Error(`${model} takes no ${kind === "image" ? "images" : kind === "audio" ? "sounds" : "videos"}: ${name} cannot be sent`);
    return { kind, name, url: await dataUrl(file) };
  }
  if (file.type === "application/pdf" || /\.pdf$/i.test(name)) {
    const instead = modalities.includes("image") ? "send pictures of its pages, or its text" : "send its text";
    throw new Error(`${name} is a PDF, which neither this page nor ${model} reads: ${instead}`);
  }
  if (file.size > MAX_TEXT_BYTES) throw new Error(`${name} is too long to be sent as text (${MAX_TEXT_BYTES >> 20} MB at most)`);
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (text.includes("\0")) throw new Error("binary");
    return { kind: "text", name, text };
  } catch {
    throw new Error(`${name} is neither a text nor a picture, sound or video`);
  }
}

/** @param {Blob} blob @returns {Promise<string>} */
function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(/** @type {string} */ (reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** A text file as a part of the prompt. @param {Attachment} file */
function fileText({ name, text = "" }) {
  const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `File: ${name}\n${fence}\n${text}\n${fence}`;
}

/**
 * Content of a user's message for POST /v1/chat/completions.
 * @param {string} text
 * @param {Attachment[]} files
 */
export function chatContent(text, files) {
  if (!files.length) return text;
  const parts = files.map((file) => {
    if (file.kind === "text") return { type: "text", text: fileText(file) };
    const type = `${file.kind}_url`;
    return { type, [type]: { url: file.url } };
  });
  return text.trim() ? [...parts, { type: "text", text }] : parts;
}

/**
 * Content of a user's message for POST /v1/responses.
 * @param {string} text
 * @param {Attachment[]} files
 */
export function responsesContent(text, files) {
  const parts = files.map((file) => {
    if (file.kind === "text") return { type: "input_text", text: fileText(file) };
    if (file.kind === "image") return { type: "input_image", image_url: file.url };
    return { type: "input_file", filename: file.name, file_data: file.url };
  });
  return text.trim() ? [...parts, { type: "input_text", text }] : parts;
}

/** Records the microphone. */
export class Recorder {
  /** @param {MediaStream} stream */
  constructor(stream) {
    this.stream = stream;
    /** @type {Blob[]} */
    this.pieces = [];
    this.recorder = new MediaRecorder(stream);
    this.recorder.ondataavailable = (event) => this.pieces.push(event.data);
    this.recorder.start();
  }

  /** @throws {DOMException} The user or the browser does not allow it. */
  static async start() {
    return new Recorder(await navigator.mediaDevices.getUserMedia({ audio: true }));
  }

  /** @returns {Promise<Attachment>} What was recorded, as a WAV file: the one form that every server reads. */
  async stop() {
    const stopped = new Promise((resolve) => { this.recorder.onstop = resolve; });
    this.recorder.stop();
    await stopped;
    for (const track of this.stream.getTracks()) track.stop();
    const context = new OfflineAudioContext(1, 1, SAMPLE_RATE);
    const sound = await context.decodeAudioData(await new Blob(this.pieces).arrayBuffer());
    const wav = wavOf(sound.getChannelData(0), SAMPLE_RATE);
    return { kind: "audio", name: `Recording, ${sound.duration.toFixed(0)} s`, url: await dataUrl(new Blob([wav], { type: "audio/wav" })) };
  }
}

/** @param {Float32Array} samples @param {number} rate @returns {ArrayBuffer} 16 bits, one channel. */
export function wavOf(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const write = (place, text) => [...text].forEach((char, index) => view.setUint8(place + index, char.charCodeAt(0)));
  write(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  write(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  write(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, index) => view.setInt16(44 + 2 * index, Math.round(Math.max(-1, Math.min(1, sample)) * 32767), true));
  return view.buffer;
}
