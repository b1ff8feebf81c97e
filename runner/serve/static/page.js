import { chat, hasKey, keep as keepKey, model, Problem, waiting } from "./api.js";
import { forget, keep, kept, list, newId } from "./dialogues.js";
import { button, copyButton, made } from "./elements.js";
import { begin as beginFollowing, follow } from "./follow.js";
import { Reply } from "./reply.js";

const TAB = `eagle3-serve-tab ${location.pathname}`;
const THEME = "eagle3-serve-theme";
const OPTIONS = ["system", "temperature", "longest", "seed", "markdown"];
const at = (id) => document.getElementById(id);
const turns = []; // for each question: its text and element, its reply, and `asked`, true while the reply is generated
let current = newId(); // the dialogue
let leaving = null; // aborts the answer that is being generated
let context = Infinity; // tokens
let gone = false; // true once the reader leaves the page: results of running requests are then ignored

const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
const asMarkdown = () => ({ always: true, never: false })[at("markdown").value];

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
  at("welcome").hidden = turns.length > 0;
  const sum = (name) => turns.reduce((total, { reply }) => total + (reply?.counts[name] ?? 0), 0);
  const drafts = sum("proposing");
  at("acceptance").textContent = drafts ? (1 + sum("accepted") / drafts).toFixed(2) : "–";
  at("share").textContent = sum("tokens") ? `${Math.round((100 * sum("drafted")) / sum("tokens"))}%` : "–";
  const seconds = sum("seconds"); // an answer that arrives all at once has no rate
  at("rate").textContent = seconds >= 0.05 ? Math.round(sum("tokens") / seconds) : "–";
}

function turnOf(text) {
  const turn = { text, question: made("li", "question", at("turns")), reply: null };
  made("div", "asked", turn.question).textContent = text;
  button("Edit", "edit", made("div", "deeds", turn.question), () => edit(turn)).title = "Begins a new dialogue";
  turns.push(turn);
  return turn;
}

function replyTo(turn) {
  // A new reply is shown as Markdown from its first word if an earlier answer was Markdown.
  const reply = new Reply(made("li", "answer", at("turns")), asMarkdown(), turns.some(({ reply }) => reply?.markdown));
  const deeds = made("div", "deeds", reply.root.querySelector(".told"));
  copyButton(deeds, () => reply.text);
  button("Retry", "retry", deeds, () => !leaving && turns.at(-1) === turn && answer(turn));
  return reply;
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
  at("problem").hidden = true;
  const before = turn.reply;
  before?.root.remove();
  const reply = (turn.reply = replyTo(turn));
  reply.root.classList.add("writing");
  turn.asked = true;
  const mine = (leaving = new AbortController());
  busy(true);
  show();
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
  if (leaving !== mine) return; // another dialogue was opened meanwhile
  leaving = null;
  turn.asked = false;
  const full = reply.context >= context;
  reply.end(problem ? "broken" : mine.signal.aborted ? "stopped" : full ? "full" : reply.reason);
  if (!reply.text && (problem || mine.signal.aborted)) giveBack(turn, before);
  show();
  if (problem) tell(problem);
  else at("status").textContent = reply.summary;
  if (full) tell(new Problem(`The context is full: it has ${context} tokens.`, "context_length_exceeded"));
  save();
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

// The tab keeps which dialogue it shows, and the options.
function remember() {
  sessionStorage.setItem(TAB, JSON.stringify({ current, options: options() }));
}

function save() {
  if (gone) return;
  const keptOf = ({ reply, asked }) => ({ ...reply.kept, ...(asked && { reason: "left" }) });
  const said = turns.map((turn) => ({ text: turn.text, reply: keptOf(turn) }));
  try {
    keep(current, { options: options(), turns: said });
  } catch {
    tell(new Problem("The browser has no room to keep this dialogue: delete others under Dialogues."));
  }
}

// Begins another dialogue with the first `count` turns of the one on the page, which is kept as it is. What is being
// generated ends.
function part(id, count = 0) {
  if (leaving) save();
  leaving?.abort();
  leaving = null;
  current = id;
  for (const { question, reply } of turns.splice(count)) [question, reply.root].forEach((element) => element.remove());
  at("problem").hidden = true;
  show();
  remember();
  busy(false);
}

function edit(turn) {
  part(newId(), turns.indexOf(turn));
  at("words").value = turn.text;
  at("words").focus();
}

function open(id, options) {
  part(id);
  const dialogue = kept(id);
  setOptions(options ?? dialogue?.options);
  for (const { text, reply } of dialogue?.turns ?? []) {
    if (reply.reason === "left" && !reply.said.length) at("words").value = text;
    else (turnOf(text).reply = replyTo(turns.at(-1))).restore(reply);
  }
  if (turns.length) follow();
  show();
}

const options = () => Object.fromEntries(OPTIONS.map((id) => [id, at(id).value]));

function setOptions(values = {}) {
  for (const id of OPTIONS) if (id in values) at(id).value = values[id];
}

function listDialogues() {
  at("kept").replaceChildren();
  for (const { id, turns: [{ text }], time } of list()) {
    const title = text.slice(0, 100);
    const row = made("li", "", at("kept"));
    const entry = button(title, "entry", row, () => {
      open(id);
      at("dialogues").hidePopover();
    });
    entry.ariaCurrent = id === current;
    const date = new Date(time).toLocaleString([], { dateStyle: "short", timeStyle: "short" });
    made("small", "", entry).textContent = date;
    button("Delete", "delete", row, () => {
      if (id === current) part(newId());
      forget(id);
      listDialogues();
      at("dialogues").focus();
    }).ariaLabel = `Delete: ${title}`;
  }
  at("none").hidden = at("kept").childElementCount > 0;
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
  answer(turnOf(text));
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
for (const id of ["fresh", "anew"]) at(id).addEventListener("click", () => part(newId()));
at("dialogues").addEventListener("beforetoggle", ({ newState }) => newState === "open" && listDialogues());
addEventListener("pagehide", () => {
  remember();
  if (leaving) save();
  gone = true;
});
addEventListener("pageshow", () => (gone = false));
at("ask-key").addEventListener("close", () => {
  const key = at("key").value.trim();
  if (key) {
    keepKey(key);
    at("problem").hidden = true;
    begin();
  } else tell(new Problem("This server asks for a key: send a message to give one."));
  at("words").focus();
});
at("markdown").addEventListener("change", () => turns.forEach(({ reply }) => reply.drawAs(asMarkdown())));
at("colours").addEventListener("change", (event) => at("turns").classList.toggle("plain", !event.target.checked));
at("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  const dark = dataset.theme ? dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  localStorage.setItem(THEME, (dataset.theme = dark ? "light" : "dark"));
});
// The options are hidden when a message is sent, and a browser says nothing of a hidden field.
at("options").addEventListener("invalid", ({ target }) => {
  if (target !== at("options").querySelector(":invalid")) return;
  at("options").showPopover();
  const name = target.closest("label").firstChild.textContent.trim();
  tell(new Problem(`${name} ${target.value} is not taken: ${target.validationMessage}`));
}, true);
if (localStorage.getItem(THEME)) document.documentElement.dataset.theme = localStorage.getItem(THEME);
beginFollowing(document.querySelector("main"), at("composer"));
const tab = JSON.parse(sessionStorage.getItem(TAB) ?? "{}");
open(tab.current ?? current, tab.options);
begin();
