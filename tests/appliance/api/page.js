// Runs the page's script with just so much of a browser that it can ask a server and be told a key.
"use strict";

const fs = require("fs");
const vm = require("vm");

const [script, answers] = [process.argv[2], JSON.parse(process.argv[3])];
const told = { asked: [], dialogs: [] };
const stored = new Map();
const elements = new Map();
const keys = [...answers.keys];

class Element extends EventTarget {
  constructor() {
    super();
    Object.assign(this, { children: [], options: [], dataset: {}, files: [], value: "", src: "", hidden: true });
    this.classList = { add() {}, toggle() {} };
    this.parts = new Map();
  }
  get content() { return { firstElementChild: this }; }
  querySelector(name) {
    if (!this.parts.has(name)) this.parts.set(name, new Element());
    return this.parts.get(name);
  }
  cloneNode() { return new Element(); }
  add(option) { this.options.push(option); }
  append() {}
  replaceChildren(...children) { this.children = children; }
  showModal() {
    told.dialogs.push({ isWrong: !byId("key-wrong").hidden, text: byId("key").value });
    byId("key").value = keys.shift();
    setTimeout(() => this.dispatchEvent(new Event("close")), 1);
  }
}

const byId = (id) => {
  if (!elements.has(id)) elements.set(id, new Element());
  return elements.get(id);
};

let numStatuses = 0;
async function fetch(path, options) {
  if (path !== "health" && options.headers.Authorization !== `Bearer ${answers.key}`) return { status: 401, ok: false };
  told.asked.push(path);
  if (path === "v1/cameras" && ++numStatuses === 4) {
    console.log(JSON.stringify(told));
    process.exit(0);
  }
  const data = { health: { status: "ok" }, "v1/models": { data: [{ id: "m" }] }, "v1/cameras": { data: answers.cameras } };
  const ok = path in data || path.includes(answers.shown);
  return { status: ok ? 200 : 503, ok, json: async () => data[path], blob: async () => new Blob() };
}

vm.runInNewContext(fs.readFileSync(script, "utf8"), {
  Blob, URL, URLSearchParams, fetch,
  clearTimeout, clearInterval, setInterval,
  setTimeout: (then, ms) => setTimeout(then, ms / 20),
  document: { getElementById: byId, createElement: () => new Element(), hidden: false },
  sessionStorage: { getItem: (key) => stored.get(key) ?? null, setItem: (key, value) => stored.set(key, value) },
  Option: class { constructor(text, value) { this.value = value; } },
});
