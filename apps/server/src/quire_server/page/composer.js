/** Where a message is written: the box, files, the microphone, and the buttons that send and stop. */

import { Recorder, attachmentOf } from "./attachments.js";
import { byId, icon, iconButton, make } from "./dom.js";
import { fileView } from "./message_view.js";

/** @typedef {import("./conversations.js").Attachment} Attachment */

const ACCEPTED = { image: "image/*", audio: "audio/*", video: "video/*" };

export class Composer {
  /** @param {import("./chat.js").Chat} chat */
  constructor(chat) {
    this.chat = chat;
    /** @type {Attachment[]} */
    this.files = [];
    /** @type {string[]} */
    this.modalities = [];
    this.model = "";
    this.transcribes = false;
    /** @type {Recorder|null} */
    this.recorder = null;
    this.note = make("div", { id: "note", role: "status" });
    this.shown = make("div.files", { id: "files", role: "group", "aria-label": "Files to send" });
    this.chooser = make("input", { id: "chooser", type: "file", multiple: true, hidden: true, onchange: () => this.#choose() });
    this.box = make("textarea", { id: "prompt", rows: 1, placeholder: "Ask anything", "aria-label": "Message", oninput: () => this.#fit(), onkeydown: (event) => this.#key(event) });
    this.microphone = iconButton("mic", "Record a sound", () => this.#record(), { id: "record", hidden: true });
    this.sendButton = make("button.send", { id: "send", type: "button", title: "Send (Enter)", "aria-label": "Send", onclick: () => this.send() }, icon("send"));
    this.stopButton = make("button.send", { id: "stop-answer", type: "button", title: "Stop (Esc)", "aria-label": "Stop", hidden: true, onclick: () => chat.stop() }, icon("stop"));
    const attach = iconButton("clip", "Attach files", () => this.chooser.click(), { id: "attach" });
    const row = make("div.row", {}, attach, this.microphone, this.box, this.sendButton, this.stopButton);
    byId("composer").append(this.note, make("div.box", {}, this.shown, row), this.chooser);
    chat.addEventListener("running", () => this.#showRunning());
    document.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    document.addEventListener("dragover", (event) => this.#drag(event));
    document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dragging"); });
    document.addEventListener("drop", (event) => { document.body.classList.remove("dragging"); this.#take(event, event.dataTransfer); });
  }

  /**
   * What can be sent.
   * @param {string} model
   * @param {string[]} modalities
   * @param {boolean} transcribes  Whether it writes what it hears, and nothing else.
   */
  setModel(model, modalities, transcribes) {
    this.model = model;
    this.transcribes = transcribes;
    this.box.placeholder = transcribes ? "Record or drop a sound; names that come in it may stand here" : "Ask anything";
    this.modalities = modalities;
    this.microphone.hidden = !modalities.includes("audio") || !navigator.mediaDevices;
    const kinds = Object.entries(ACCEPTED).filter(([kind]) => modalities.includes(kind)).map(([, type]) => type);
    this.chooser.accept = [...kinds, "text/*", ".md", ".json", ".csv", ".py", ".js", ".ts", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".yaml", ".yml", ".toml", ".sh", ".sql", ".log", ".tex"].join(",");
  }

  focus() {
    this.box.focus();
  }

  /** @param {string} [text]  In place of what the box holds. */
  send(text) {
    if (this.chat.running) return;
    const said = text ?? this.box.value, { files } = this;
    if (!said.trim() && !files.length) return;
    if (text === undefined) this.box.value = "";
    this.note.textContent = "";
    this.#setFiles([]);
    this.#fit();
    this.chat.send(said, files).then(() => { if (!matchMedia("(pointer: coarse)").matches) this.focus(); });
  }

  #showRunning() {
    const isRunning = this.chat.running !== null;
    this.sendButton.hidden = isRunning;
    this.stopButton.hidden = !isRunning;
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches) {
      event.preventDefault();
      this.send();
    }
  }

  #fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${this.box.scrollHeight}px`;
  }

  async #choose() {
    await this.add([...this.chooser.files]);
    this.chooser.value = "";
  }

  /** Text that is pasted or dropped goes its usual way. */
  #take(event, transfer) {
    if (!transfer || transfer.files.length === 0) return;
    event.preventDefault();
    this.add([...transfer.files]);
  }

  #drag(event) {
    if (!event.dataTransfer || ![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    document.body.classList.add("dragging");
  }

  /** @param {File[]} files */
  async add(files) {
    const results = await Promise.allSettled(files.map((file) => attachmentOf(file, this.modalities, this.model || "this model")));
    this.note.textContent = results.find((each) => each.status === "rejected")?.reason.message ?? "";
    this.#setFiles([...this.files, ...results.filter((each) => each.status === "fulfilled").map((each) => each.value)]);
    this.focus();
  }

  /** @param {Attachment[]} files */
  #setFiles(files) {
    this.files = files;
    this.shown.replaceChildren(...files.map((file) => {
      const view = fileView(file);
      view.append(iconButton("close", `Remove ${file.name}`, () => { this.#setFiles(this.files.filter((each) => each !== file)); this.focus(); }));
      return view;
    }));
  }

  async #record() {
    try {
      if (!this.recorder) {
        this.recorder = await Recorder.start();
      } else {
        const { recorder } = this;
        this.recorder = null;
        this.#setFiles([...this.files, await recorder.stop()]);
        if (this.transcribes) this.send();
      }
    } catch (error) {
      this.recorder = null;
      this.note.textContent = `the microphone cannot be used: ${error.message}`;
    }
    const isOn = this.recorder !== null;
    this.microphone.classList.toggle("recording", isOn);
    this.microphone.setAttribute("aria-label", isOn ? "End the recording" : "Record a sound");
    this.microphone.title = isOn ? "End the recording" : "Record a sound";
  }
}
