"use strict";

const KEY = "appliance-api-key";
const MAX_ROWS = 50;
const FRAME_EVERY_MS = 1000;
const STATUS_EVERY_MS = 3000;
const MAX_TOKENS = 256;

const byId = (id) => document.getElementById(id);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const cards = new Map();
const live = new Set();
let model = null;
let history = [];
let asking = null;
let engineReason = null;

// Everything that a camera, a model or a server wrote goes to the page as textContent, never as HTML.

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.status === 401) {
    // another call may have been told the key meanwhile
    if (key === sessionStorage.getItem(KEY)) await askForKey(Boolean(key));
    return call(path, options);
  }
  return response;
}

let keyAsked = null;
function askForKey(wasWrong) {
  keyAsked ??= new Promise((done) => {
    const dialog = byId("key-dialog");
    byId("key-wrong").hidden = !wasWrong;
    byId("key").value = "";
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, byId("key").value.trim());
      keyAsked = null;
      done();
    }, { once: true });
    dialog.showModal();
  });
  return keyAsked;
}

async function errorText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// One server-sent event after the other; the last id seen is kept in `state` for resuming.
async function* serverEvents(response, state = {}) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      for (const line of block.split("\n")) {
        if (line.startsWith("id: ")) state.lastId = line.slice(4);
        if (line.startsWith("data: ")) yield line.slice(6);
      }
    }
  }
}

// -- cameras ------------------------------------------------------------------------------------

function cardOf(name) {
  if (!cards.has(name)) {
    const card = byId("camera-card").content.firstElementChild.cloneNode(true);
    showWords(card, newest.get(name));
    byId("look").add(new Option(name, name));
    cards.set(name, card);
  }
  return cards.get(name);
}

// The picture above the words is newer than they are.
function showWords(card, event) {
  card.querySelector(".when").textContent = event ? `${timeOf(event)} · ` : "";
  card.querySelector(".said").textContent = event?.description ?? "";
}

function showCameras(cameras) {
  for (const camera of cameras) showCamera(camera, cardOf(camera.name));
  const names = new Set(cameras.map((camera) => camera.name));
  for (const name of [...cards.keys()].filter((name) => !names.has(name))) {
    cards.delete(name);
    live.delete(name);
    [...byId("look").options].find((option) => option.value === name)?.remove();
  }
  const wanted = cameras.map((camera) => cards.get(camera.name));
  const shown = [...byId("cameras").children];
  if (wanted.length === shown.length && wanted.every((card, i) => card === shown[i])) return;
  const none = document.createElement("p");
  none.className = "quiet";
  none.textContent = "No cameras yet.";
  byId("cameras").replaceChildren(...(wanted.length ? wanted : [none]));
}

function showCamera(camera, card) {
  const title = camera.friendly_name ?? camera.name;
  const rate = camera.fps ? `, ${camera.fps.toFixed(1)} frames/s` : "";
  const reason = card.querySelector(".reason");
  if (camera.state === "running") live.add(camera.name);
  else live.delete(camera.name);
  card.querySelector("strong").textContent = title;
  card.querySelector("strong").title = camera.name;
  card.querySelector("img").alt = `newest frame of ${title}`;
  card.querySelector(".quiet").textContent = `${camera.state}${rate}`;
  card.classList.toggle("away", camera.state !== "running");
  card.classList.toggle("off", camera.state === "stopped" || camera.state === "ended");
  reason.textContent = camera.reason ?? "";
  reason.hidden = !camera.reason;
  const option = [...byId("look").options].find((option) => option.value === camera.name);
  option.textContent = `camera ${title}`;
  option.disabled = camera.state !== "running";
}

async function showImage(image, path) {
  const response = await call(path);
  if (!response.ok) return false;
  const old = image.src;
  image.src = URL.createObjectURL(await response.blob());
  if (old.startsWith("blob:")) URL.revokeObjectURL(old);
  return true;
}

// A camera that has no frame of now is asked again when it is told to run, not each second.
async function showFrame(name) {
  const image = cards.get(name).querySelector("img");
  if (!await showImage(image, `v1/cameras/${encodeURIComponent(name)}/frame.jpg`)) live.delete(name);
}

async function followStatus() {
  for (;;) {
    try {
      const health = await (await call("health")).json();
      setHealth(health.status, health.engine?.reason, health.reasons);
      if (model === null) {
        model = (await (await call("v1/models")).json()).data[0].id;
        byId("model").textContent = model;
      }
      showCameras((await (await call("v1/cameras")).json()).data);
    } catch {
      setHealth("not reachable");
    }
    await pause(STATUS_EVERY_MS);
  }
}

function setHealth(status, reason, reasons = []) {
  engineReason = reason ?? (status === "not reachable" ? "the server is not reachable" : null);
  const health = byId("health");
  const told = reason ?? (status === "ok" ? null : reasons[0]);
  health.textContent = told ? `${status}: ${told}` : status;
  health.title = reasons.join("\n");
  health.className = status === "ok" ? "ok" : "bad";
}

async function followFrames() {
  for (;;) {
    if (!document.hidden) {
      await Promise.allSettled([...live].map(showFrame));
    }
    await pause(FRAME_EVERY_MS);
  }
}

// -- descriptions -------------------------------------------------------------------------------

async function followEvents() {
  const state = {};
  for (;;) {
    try {
      const resume = state.lastId ? { "Last-Event-ID": state.lastId } : {};
      const response = await call(`v1/events?limit=${MAX_ROWS}`,
        { headers: { Accept: "text/event-stream", ...resume } });
      for await (const data of serverEvents(response, state)) onEvent(JSON.parse(data));
    } catch {
      // the status line tells that the server is away
    }
    await pause(2000);
  }
}

// While words are looked for, the list shows what was found; what is new goes to the cameras only.
let wanted = "";
let searchTimer = null;
const newest = new Map();

function onEvent(event) {
  // an event is told again whenever its track moves on, the camera's card shows the newest words
  const last = newest.get(event.camera);
  if (event.description !== null && !(last?.captured_at > event.captured_at)) {
    newest.set(event.camera, event);
    if (cards.has(event.camera)) showWords(cards.get(event.camera), event);
  }
  if (wanted === "") showEvent(event);
}

async function search() {
  const words = byId("search").value.trim();
  if (words === wanted) return;
  wanted = words;
  const query = new URLSearchParams({ limit: MAX_ROWS, ...(words && { q: words }) });
  const response = await call(`v1/events?${query}`);
  const problem = response.ok ? "" : await errorText(response);
  const { data, next_cursor: more } = response.ok ? await response.json() : { data: [] };
  if (words !== wanted) return;
  for (const image of byId("events").querySelectorAll("img")) URL.revokeObjectURL(image.src);
  byId("events").replaceChildren();
  for (const event of data.reverse()) showEvent(event);
  byId("found").textContent = problem || (words && `${more ? "the newest " : ""}${data.length} found`);
}

// An event that is told again stays where it is in the list.
function showEvent(event) {
  const rows = byId("events");
  const known = [...rows.children].find((row) => row.dataset.id === event.id);
  const row = known ?? byId("event-row").content.firstElementChild.cloneNode(true);
  row.dataset.id = event.id;
  row.event = event;
  const text = row.querySelector("p");
  text.textContent = event.description ?? (event.error ? `not described: ${event.error}` : "not described yet");
  text.classList.toggle("failed", Boolean(event.error) && !whyDropped(event));
  const image = row.querySelector("img");
  if (image.hidden && event.described_at !== null) {
    image.addEventListener("load", () => { image.hidden = false; }, { once: true });
    showImage(image, `v1/events/${encodeURIComponent(event.id)}/snapshot.jpg`).catch(() => {});
  }
  if (!known) {
    const older = [...rows.children].find((other) => other.event.captured_at <= event.captured_at);
    rows.insertBefore(row, older ?? null);
  }
  while (rows.children.length > MAX_ROWS) {
    URL.revokeObjectURL(rows.lastElementChild.querySelector("img").src);
    rows.lastElementChild.remove();
  }
  fold(rows);
}

const whyDropped = (event) => /^(replaced|expired|overflow):/.exec(event.error ?? "")?.[1];

// Of events that the queue dropped for one reason, one after the other, one line is shown, which counts them.
function fold(rows) {
  let first = null;
  let folded = [];
  for (const row of rows.children) {
    const why = whyDropped(row.event);
    const isMore = Boolean(first && why) && why === whyDropped(first.event);
    if (!isMore) [first, folded] = [row, []];
    folded.push(row.event);
    row.hidden = isMore;
    first.querySelector(".quiet").textContent = headOf(folded);
  }
}

const timeOf = (event) => new Date(event.captured_at * 1000).toLocaleTimeString();

function headOf(events) {
  const all = (values) => [...new Set(values)].join(", ");
  const zones = [...new Set(events.flatMap((event) => event.zones))];
  const head = [timeOf(events[0]), all(events.map((event) => event.camera)), all(events.map((event) => event.label)), ...zones];
  return (events.length > 1 ? [...head, `${events.length} events`] : head).join(" · ");
}

// -- chat ---------------------------------------------------------------------------------------

function addTurn(text, kind, picture) {
  const turn = document.createElement("div");
  turn.className = `turn ${kind}`;
  if (picture) {
    const image = document.createElement("img");
    image.src = picture;
    image.alt = "the picture that was sent";
    turn.append(image);
  }
  turn.append(text);
  if (history.length === 0 && kind === "mine") byId("talk").replaceChildren();
  byId("talk").append(turn);
  scrollToEnd();
  return turn;
}

const scrollToEnd = () => { byId("talk").scrollTop = byId("talk").scrollHeight; };

const asDataUri = (blob) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(blob);
});

// The picture is frozen when it is sent, so that the rest of the conversation is about the same one.
async function chosenPicture() {
  const file = byId("picture").files[0];
  if (file) return asDataUri(file);
  const camera = byId("look").value;
  if (!camera) return null;
  const response = await call(`v1/cameras/${encodeURIComponent(camera)}/frame.jpg`);
  if (!response.ok) throw new Error(await errorText(response));
  return asDataUri(await response.blob());
}

async function ask(question) {
  const picture = await chosenPicture();
  addTurn(question, "mine", picture);
  const image = picture ? [{ type: "image_url", image_url: { url: picture } }] : [];
  history.push({ role: "user", content: [...image, { type: "text", text: question }] });
  byId("picture").value = "";
  byId("picked").textContent = "";
  const turn = addTurn("", "theirs");
  const times = [performance.now()];
  const note = addNote("");
  const waiting = setInterval(() => {
    note.textContent = engineReason ? `no answer comes: ${engineReason}` : "";
  }, 500);
  try {
    await readAnswer(turn, times);
    history.push({ role: "assistant", content: turn.textContent });
  } catch (error) {
    history.pop();
    if (error.name === "AbortError") return;
    turn.classList.add("failed");
    turn.append(turn.textContent ? `\n${error.message}` : error.message);
  } finally {
    clearInterval(waiting);
    note.remove();
    scrollToEnd();
  }
  showTimes(times);
}

function addNote(text) {
  const line = document.createElement("div");
  line.className = "times";
  line.textContent = text;
  byId("talk").append(line);
  scrollToEnd();
  return line;
}

async function readAnswer(turn, times) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model, messages: history, stream: true, temperature: 0, max_tokens: MAX_TOKENS }),
    signal: asking.signal,
  });
  if (!response.ok) throw new Error(await errorText(response));
  for await (const data of serverEvents(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const text = chunk.choices[0]?.delta.content;
    if (!text) continue;
    times.push(performance.now());
    turn.append(text);
    scrollToEnd();
  }
  throw new Error("the answer broke off");
}

function showTimes(times) {
  if (times.length < 2) return;
  const gaps = times.slice(2).map((time, i) => time - times[i + 1]).sort((a, b) => a - b);
  const middle = gaps.length ? `, then every ${gaps[gaps.length >> 1].toFixed(0)} ms` : "";
  addNote(`first text after ${(times[1] - times[0]).toFixed(0)} ms${middle}`);
}

async function onSubmit(event) {
  event.preventDefault();
  if (asking) {
    asking.abort();
    return;
  }
  const question = byId("question").value.trim();
  if (!question) return;
  if (model === null) {
    addTurn(engineReason ?? "the server has not answered yet", "failed");
    return;
  }
  byId("question").value = "";
  byId("send").textContent = "Stop";
  asking = new AbortController();
  try {
    await ask(question);
  } catch (error) {
    addTurn(error.message, "failed");
  }
  asking = null;
  byId("send").textContent = "Send";
}

byId("ask").addEventListener("submit", onSubmit);
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
byId("picture").addEventListener("change", () => {
  byId("picked").textContent = byId("picture").files[0]?.name ?? "";
});
byId("search").addEventListener("input", () => {
  clearTimeout(searchTimer);
  searchTimer = setTimeout(() => search().catch(() => { wanted = ""; }), 250);
});
byId("fresh").addEventListener("click", () => {
  asking?.abort();
  history = [];
  byId("talk").replaceChildren();
});

followStatus();
followFrames();
followEvents();
