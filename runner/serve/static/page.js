import { chat, hasKey, keep, model, Problem, waiting } from "./api.js";
import { begin as beginFollowing, follow } from "./follow.js";
import { made } from "./markdown.js";
import { Reply } from "./reply.js";

const DIALOGUE = `eagle3-serve-dialogue ${location.pathname}`;
const THEME = "eagle3-serve-theme";
const at = (id) => document.getElementById(id);
const turns = []; // for each question: its text and element, its reply, and `asked`, true while the reply is generated
let leaving = null; // aborts the answer that is being generated
let context = Infinity; // tokens
let gone = false; // true once the reader leaves the page: results of running requests are then ignored

const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
const asMarkdown = () => ({ always: true, never: false })[at("markdown").value];

// A new reply is shown as Markdown from its first word if an earlier answer was Markdown.
const expected = () => asMarkdown() ?? (turns.some(({ reply }) => reply?.markdown) || undefined);

function messages() {
  const system = at("system").value.trim();
  const said = [];
  for (const { text, reply, asked } of turns) {
    if (asked || reply.text) said.push({ role: "user", content: text });
    if (!asked && reply.text) said.push({ role: "assistant", content: reply.text });
  }
  return [...(system ? [{ role: "system", content: system }] : []), ...said];
}

function show() {
  const sum = (name) => turns.reduce((total, { reply }) => total + (reply?.counts[name] ?? 0), 0);
  const drafts = sum("proposing");
  at("acceptance").textContent = drafts ? (1 + sum("accepted") / drafts).toFixed(2) : "–";
  at("share").textContent = sum("tokens") ? `${Math.round((100 * sum("drafted")) / sum("tokens"))}%` : "–";
  const seconds = sum("seconds"); // an answer that arrives all at once has no rate
  at("rate").textContent = seconds >= 0.05 ? Math.round(sum("tokens") / seconds) : "–";
}

function item(className, text) {
  const element = made("li", className, at("turns"));
  element.textContent = text;
  return element;
}

function replyTo(turn) {
  const reply = new Reply(item("answer", ""), expected());
  const deeds = made("div", "deeds", reply.root.querySelector(".told"));
  button("Copy", "copy", deeds, async ({ target }) => {
    await copy(reply.text);
    target.textContent = "Copied";
    setTimeout(() => (target.textContent = "Copy"), 1500);
  });
  button("Retry", "retry", deeds, () => !leaving && turns.at(-1) === turn && answer(turn));
  return reply;
}

function button(text, className, parent, click) {
  const element = made("button", `quiet ${className}`, parent);
  Object.assign(element, { type: "button", textContent: text });
  element.addEventListener("click", click);
}

// Browsers offer the clipboard only to encrypted pages and to pages of this machine.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = made("textarea", "unseen", document.body);
  field.value = text;
  field.select();
  document.execCommand("copy");
  field.remove();
}

function busy(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
  if (!is && !matchMedia("(pointer: coarse)").matches) at("words").focus({ preventScroll: true });
}

// Shows the reason why an answer has not begun, until the returned function is called. Requests are served in order, so
// once no request waits, the model reads this one.
function saying(reply) {
  const begun = performance.now();
  let reading = false;
  let timer = setTimeout(look, 300);
  async function look() {
    const others = await waiting().catch(() => 0);
    if (timer === null) return;
    reading ||= others === 0;
    const text = reading ? "The model reads" : "Waiting: the model is busy with another request";
    reply.figures.textContent = `${text}, ${Math.round((performance.now() - begun) / 1000)} s`;
    if (at("status").textContent !== text) at("status").textContent = text;
    timer = setTimeout(look, 1000);
  }
  return () => {
    clearTimeout(timer);
    timer = null;
  };
}

// Requests the answer to a question, or a new one. An earlier answer comes back if the new one stays empty.
async function answer(turn) {
  at("welcome").hidden = true;
  at("problem").hidden = true;
  const before = turn.reply;
  before?.root.remove();
  const reply = (turn.reply = replyTo(turn));
  reply.root.classList.add("writing");
  turn.asked = true;
  const mine = (leaving = new AbortController());
  busy(true);
  follow();
  const told = saying(reply);
  let problem = null;
  try {
    const body = {
      model: at("model").dataset.id,
      messages: messages(),
      temperature: number("temperature"),
      max_completion_tokens: number("longest"),
      seed: number("seed"),
    };
    for await (const chunk of chat(body, mine.signal)) {
      if (chunk.usage || chunk.choices.some(({ speculation, finish_reason: end }) => speculation || end)) told();
      reply.take(chunk);
      show();
    }
  } catch (error) {
    if (error.name !== "AbortError") problem = error;
  }
  told();
  if (leaving !== mine) return; // a new dialogue was begun meanwhile
  leaving = null;
  turn.asked = false;
  const full = reply.context >= context;
  reply.end(problem ? "broken" : mine.signal.aborted ? "stopped" : full ? "full" : reply.reason);
  if (!reply.text && (problem || mine.signal.aborted)) giveBack(turn, before);
  show();
  save();
  if (problem) tell(problem);
  else at("status").textContent = reply.summary;
  if (full) tell(new Problem(`The context is full: it has ${context} tokens.`, "context_length_exceeded"));
  busy(false);
}

function giveBack(turn, before) {
  turn.reply.root.remove();
  turn.reply = before;
  if (before) return at("turns").append(before.root);
  turn.question.remove();
  turns.splice(turns.indexOf(turn), 1);
  at("words").value = [turn.text, at("words").value].filter(Boolean).join("\n");
}

function tell(problem) {
  if (problem instanceof Problem && problem.status === 401) return askKey();
  const full = problem.code === "context_length_exceeded" && turns.length > 0;
  at("reason").textContent = problem.message;
  at("anew").hidden = !full;
  at("problem").hidden = false;
}

function askKey() {
  at("key").value = "";
  at("key-wrong").hidden = !hasKey();
  at("ask-key").showModal();
}

function clear() {
  leaving?.abort();
  leaving = null;
  turns.length = 0;
  at("turns").replaceChildren();
  at("welcome").hidden = false;
  at("problem").hidden = true;
  show();
  save();
  busy(false);
}

// A dialogue is kept as long as its tab, and so is the key. It is not kept if it is too long for the browser's storage.
function save() {
  if (gone) return;
  const options = {};
  for (const id of ["system", "temperature", "longest", "seed", "markdown"]) options[id] = at(id).value;
  const kept = turns.map(({ text, reply, asked }) => ({ text, reply: { ...reply.kept, ...(asked && { reason: "left" }) } }));
  try {
    sessionStorage.setItem(DIALOGUE, JSON.stringify({ options, turns: kept }));
  } catch {
    sessionStorage.removeItem(DIALOGUE);
  }
}

function restore() {
  const { options = {}, turns: kept = [] } = JSON.parse(sessionStorage.getItem(DIALOGUE) ?? "{}");
  for (const [id, value] of Object.entries(options)) if (at(id)) at(id).value = value;
  for (const { text, reply } of kept) {
    if (reply.reason === "left" && !reply.text) {
      at("words").value = text;
      continue;
    }
    const turn = { text, question: item("asked", text) };
    turns.push(turn);
    turn.reply = replyTo(turn);
    turn.reply.restore(reply);
  }
  at("welcome").hidden = turns.length > 0;
  if (turns.length) follow();
  show();
}

async function begin() {
  try {
    const card = await model();
    at("model").textContent = at("model").dataset.id = document.title = card.id;
    at("longest").max = context = card.max_model_len;
  } catch (problem) {
    tell(problem);
  }
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("words").value.trim();
  if (!text || leaving) return;
  at("options").hidePopover();
  at("words").value = "";
  const turn = { text, question: item("asked", text), reply: null };
  turns.push(turn);
  answer(turn);
});
at("words").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector(":popover-open, dialog[open]")) leaving?.abort();
});
at("stop").addEventListener("click", () => leaving?.abort());
at("fresh").addEventListener("click", clear);
at("anew").addEventListener("click", clear);
addEventListener("pagehide", () => {
  save();
  gone = true;
});
addEventListener("pageshow", () => (gone = false));
at("ask-key").addEventListener("close", () => {
  const key = at("key").value.trim();
  if (key) {
    keep(key);
    at("problem").hidden = true;
    begin();
  } else tell(new Problem("This server asks for a key: send a message to give one."));
  at("words").focus();
});
at("markdown").addEventListener("change", () => turns.forEach(({ reply }) => reply.drawAs(asMarkdown())));
at("colours").addEventListener("change", (event) => at("turns").classList.toggle("plain", !event.target.checked));
at("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  localStorage.setItem(THEME, (document.documentElement.dataset.theme = dark ? "light" : "dark"));
});
// The options are hidden when a message is sent, and a browser says nothing of a hidden field.
at("options").addEventListener("invalid", ({ target }) => {
  at("options").showPopover();
  const name = target.closest("label").firstChild.textContent.trim();
  tell(new Problem(`${name} ${target.value} is not taken: ${target.validationMessage}`));
}, true);
if (localStorage.getItem(THEME)) document.documentElement.dataset.theme = localStorage.getItem(THEME);
try {
  restore();
} catch {
  clear(); // what another version of this page stored
}
beginFollowing(document.querySelector("main"), at("composer"));
begin();
