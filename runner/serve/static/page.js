import { chat, keep, model, Problem } from "./api.js";
import { Reply } from "./reply.js";

const at = (id) => document.getElementById(id);
const messages = []; // of the dialogue, without the system message
const totals = { tokens: 0, drafted: 0, rounds: 0, proposing: 0, accepted: 0, seconds: 0 };
let leaving = null; // of the answer under way

const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));

function body() {
  const system = at("system").value.trim();
  return {
    model: at("model").dataset.id,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: number("temperature"),
    max_completion_tokens: number("longest"),
    seed: number("seed"),
  };
}

function show(reply) {
  const sum = (name) => totals[name] + (reply?.counts[name] ?? 0);
  const drafts = sum("proposing");
  at("acceptance").textContent = drafts ? (1 + sum("accepted") / drafts).toFixed(2) : "–";
  at("share").textContent = sum("tokens") ? `${Math.round((100 * sum("drafted")) / sum("tokens"))}%` : "–";
  at("rate").textContent = sum("seconds") > 0 ? Math.round(sum("tokens") / sum("seconds")) : "–";
}

function following(change) {
  const page = document.scrollingElement;
  const end = page.scrollHeight - page.scrollTop - page.clientHeight < 40;
  change();
  if (end) page.scrollTop = page.scrollHeight;
}

function item(className, text) {
  const made = document.createElement("li");
  made.className = className;
  made.textContent = text;
  at("turns").append(made);
  return made;
}

function busy(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
  if (!is) at("words").focus();
}

async function say(text) {
  at("welcome").hidden = true;
  at("problem").hidden = true;
  messages.push({ role: "user", content: text });
  const question = item("asked", text);
  const reply = new Reply(item("answer writing", ""));
  const mine = (leaving = new AbortController());
  busy(true);
  let problem = null;
  try {
    following(() => reply.root.scrollIntoView({ block: "end" }));
    for await (const chunk of chat(body(), mine.signal)) {
      following(() => reply.take(chunk));
      show(reply);
    }
  } catch (error) {
    if (error.name !== "AbortError") problem = error;
  }
  reply.end();
  if (leaving !== mine) return; // the dialogue was begun anew meanwhile
  leaving = null;
  for (const name in totals) totals[name] += reply.counts[name];
  show();
  if (reply.text) messages.push({ role: "assistant", content: reply.text });
  else {
    messages.pop(); // nothing was said: the question goes back to where it was written
    if (problem || mine.signal.aborted) {
      question.remove();
      reply.root.remove();
      at("words").value = text;
    }
  }
  if (problem) await told(problem);
  else at("status").textContent = reply.summary;
  busy(false);
}

async function told(problem) {
  if (problem instanceof Problem && problem.status === 401) return askKey();
  at("problem").textContent = problem.message;
  at("problem").hidden = false;
}

function askKey() {
  at("key").value = "";
  at("ask-key").showModal();
}

async function begin() {
  try {
    const card = await model();
    at("model").textContent = at("model").dataset.id = document.title = card.id;
    at("longest").max = card.max_model_len;
  } catch (problem) {
    await told(problem);
  }
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("words").value.trim();
  if (!text || leaving) return;
  at("words").value = "";
  say(text);
});
at("words").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && leaving?.abort());
at("stop").addEventListener("click", () => leaving?.abort());
at("fresh").addEventListener("click", () => {
  leaving?.abort();
  leaving = null;
  messages.length = 0;
  for (const name in totals) totals[name] = 0;
  at("turns").replaceChildren();
  at("welcome").hidden = false;
  at("problem").hidden = true;
  show();
  busy(false);
});
at("ask-key").addEventListener("close", () => {
  const key = at("key").value.trim();
  if (key) {
    keep(key);
    begin();
  } else told(new Problem("This server asks for a key: send a message to give one."));
  at("words").focus();
});
at("colours").addEventListener("change", (event) => at("turns").classList.toggle("plain", !event.target.checked));
at("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
begin();
