// What the rest of the page is made with: elements, figures in words, the gateway's API. Text only ever goes in as text.

const $ = (id) => document.getElementById(id);

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Writes only what changed: at 500 replicas that is what keeps the page smooth.
function say(node, text) {
  const wanted = text === null || text === undefined ? "" : String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

function dress(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// Replaces the children of `node` when `key` is not what they were made from.
function renew(node, key, make) {
  const text = JSON.stringify(key);
  if (node.madeFrom === text) return;
  node.madeFrom = text;
  node.replaceChildren(...make());
}

const NONE = "–";
const plainNumber = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fineNumber = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

function num(value) {
  if (value === null || value === undefined) return NONE;
  return Math.abs(value) >= 100 ? plainNumber.format(value) : fineNumber.format(value);
}
function share(value) {
  return value === null || value === undefined ? NONE : `${num(value * 100)}%`;
}
function ms(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 10000 ? `${num(value / 1000)} s` : `${num(value)} ms`;
}
function span(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return seconds < 86400 ? `${num(seconds / 3600)} h` : `${num(seconds / 86400)} d`;
}
function clock(iso) {
  return iso ? new Date(iso).toLocaleTimeString() : "";
}

function announce(text) {
  $("announce").textContent = text;
}

// --- the gateway's API ---

const BASE = location.pathname.replace(/\/dashboard\/?$/, "");
const KEY_NAME = "tidegate-key";
const key = {
  get value() { return sessionStorage.getItem(KEY_NAME); },
  set value(text) { if (text) sessionStorage.setItem(KEY_NAME, text); else sessionStorage.removeItem(KEY_NAME); },
};

// Of an application that serves several models the page is about one: the address says which, else it is the first.
const MODEL = new URLSearchParams(location.search).get("model");
function about(path) {
  if (MODEL === null || !path.startsWith("/control/")) return path;
  return `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(MODEL)}`;
}

class Refusal extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function ask(method, path, body, headers = {}, signal = AbortSignal.timeout(8000)) {
  const all = { ...headers };
  if (key.value) all.authorization = `Bearer ${key.value}`;
  if (body !== undefined) all["content-type"] = "application/json";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  return fetch(BASE + about(path), { method, headers: all, body: sent, cache: "no-store", credentials: "omit", signal });
}

async function refusal(answer) {
  let error = {};
  try { error = (await answer.json()).error ?? {}; } catch { /* not JSON: the status has to do */ }
  return new Refusal(answer.status, error.code ?? "", error.message ?? `The gateway answered with status ${answer.status}.`);
}

async function call(method, path, body) {
  const answer = await ask(method, path, body);
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

// Asks whether to go on; resolves to true or false. Escape and the second button mean no.
function sure(title, text, yes) {
  const box = $("confirm");
  say($("confirm-title"), title);
  say($("confirm-text"), text);
  say($("confirm-yes"), yes);
  box.returnValue = "no";
  box.showModal();
  return new Promise((resolve) => {
    box.addEventListener("close", () => resolve(box.returnValue === "yes"), { once: true });
  });
}
