// Shows one answer: its tokens, the author of each, and its rounds. Text of a model is inserted as text, never as HTML.

import { made } from "./elements.js";
import { judge, Markdown } from "./markdown.js";

const SHOWN = 160; // the most rounds that are drawn

export class Reply {
  // `setting`: true if the answer is shown as Markdown, false if not; undefined if its text decides. `guess` counts as
  // long as the text shows neither.
  constructor(root, setting, guess) {
    this.root = root;
    this.setting = setting;
    this.guess = guess;
    this.judge = judge();
    this.text = "";
    this.said = []; // the tokens of the text, each [text, 1 if the draft wrote it, else 0]
    this.ends = []; // the end of each token in the text
    this.thought = []; // the tokens of the reasoning
    this.proposals = []; // for each round, the numbers of proposed and of accepted tokens
    this.counts = { tokens: 0, drafted: 0, rounds: 0, proposing: 0, accepted: 0, seconds: 0 };
    this.thoughts = made("details", "thoughts", root);
    this.thoughts.hidden = true;
    this.summed = made("summary", "", this.thoughts);
    this.words = made("div", "words", root);
    const told = made("div", "told", root);
    this.rounds = made("div", "rounds", told);
    this.rounds.setAttribute("role", "img");
    this.figures = made("span", "figures", told);
    this.begun = 0;
    this.reason = "";
    this.context = 0; // the number of tokens of the dialogue up to the answer's end
    this.drawn = { said: 0, thought: 0 }; // the numbers of tokens that are on the page
    this.markdown = false;
    this.pause = 0;
  }

  take(chunk) {
    if (chunk.usage) this.count(chunk.usage);
    for (const { delta, speculation, finish_reason: reason } of chunk.choices) {
      if (reason) this.reason = reason;
      if (speculation) this.round(speculation);
      else if (delta.content) this.round({ content: [{ text: delta.content }] });
    }
    this.draw();
  }

  round({ proposed, accepted, content = [], reasoning_content: thoughts = [] }) {
    for (const { text, drafted } of thoughts) this.thought.push([text, Number(drafted)]);
    for (const { text, drafted } of content) this.push([text, Number(drafted ?? 0)]);
    this.counts.drafted += [...thoughts, ...content].filter((token) => token.drafted).length;
    if (proposed === undefined) return; // text that was held back, of rounds already counted
    const now = performance.now();
    this.begun ||= now;
    this.counts.seconds = (now - this.begun) / 1000;
    this.counts.tokens += accepted + 1; // until the server reports its own count
    this.bar(proposed, accepted);
    this.figures.textContent = this.summary;
  }

  push(token) {
    this.said.push(token);
    this.text += token[0];
    this.ends.push(this.text.length);
  }

  bar(proposed, accepted) {
    this.proposals.push([proposed, accepted]);
    this.counts.rounds += 1;
    this.counts.proposing += proposed > 0;
    this.counts.accepted += accepted;
    const bar = made("i", "", this.rounds);
    made("b", "target", bar);
    for (let place = 0; place < proposed; place++) made("b", place < accepted ? "accepted" : "", bar);
    if (this.rounds.childElementCount > SHOWN) this.rounds.firstElementChild.remove();
  }

  // A text that is cut within a round has fewer tokens than the round accepted.
  count(usage) {
    this.counts.tokens = usage.completion_tokens;
    this.context = usage.total_tokens;
    this.figures.textContent = this.summary;
  }

  // Draws what has arrived, at most once per frame. The pauses grow with the time of a drawing, so all drawings
  // together take a time linear in the length of the text.
  draw() {
    if (this.due) return;
    this.due = true;
    setTimeout(() => requestAnimationFrame(() => this.due && this.drawNow()), this.pause);
  }

  drawNow() {
    const begun = performance.now();
    this.due = false;
    this.thoughts.hidden = !this.thought.length;
    this.summed.textContent = `Reasoning, ${this.thought.length} tokens`;
    this.append("thought", this.thoughts);
    const markdown = Boolean(this.setting ?? this.judge(this.text) ?? this.guess);
    if (markdown !== this.markdown) {
      this.markdown = markdown;
      this.words.replaceChildren();
      this.words.classList.toggle("markdown", markdown);
      this.blocks = new Markdown(this.words);
      this.drawn.said = 0;
    }
    if (markdown) this.drawMarkdown();
    else this.append("said", this.words);
    this.pause = 4 * (this.root.offsetHeight && performance.now() - begun); // its height, so that the layout is timed
  }

  append(name, parent) {
    for (const [text, drafted] of this[name].slice(this.drawn[name])) {
      made("span", drafted ? "token drafted" : "token", parent).textContent = text;
    }
    this.drawn[name] = this[name].length;
  }

  drawMarkdown() {
    try {
      this.blocks.show(this.text, this.ends, this.said.map(([, drafted]) => drafted));
    } catch {
      this.drawAs(false); // the parser fails on text that is nested too deep
    }
  }

  // Draws the text again, as Markdown or as plain text; if `setting` is undefined, the text decides.
  drawAs(setting) {
    this.setting = setting;
    this.drawNow();
  }

  get summary() {
    const { tokens, rounds, proposing, accepted } = this.counts;
    const length = proposing ? `, acceptance length ${(1 + accepted / proposing).toFixed(2)}` : "";
    return `${tokens} tokens in ${rounds} rounds${length}${this.ending ? `; ${this.ending}` : ""}`;
  }

  // The reason why the answer is incomplete, for the reader.
  get ending() {
    const reasons = {
      full: "it ends where the context is full",
      length: `it ends at the limit of ${this.counts.tokens} tokens`,
      stopped: "you stopped it",
      left: "you left before its end",
      broken: "it broke off",
    };
    return reasons[this.reason] ?? "";
  }

  end(reason) {
    this.reason = reason;
    this.root.classList.remove("writing");
    this.drawNow();
    this.figures.textContent = this.summary;
    this.rounds.setAttribute("aria-label", this.summary);
  }

  // Returns the data from which `restore` draws the answer again.
  get kept() {
    const { said, thought, proposals, counts, reason, context } = this;
    return { said, thought, proposals, counts, reason, context };
  }

  restore({ said, thought, proposals, counts, reason, context }) {
    for (const token of said) this.push(token);
    for (const [proposed, accepted] of proposals) this.bar(proposed, accepted);
    Object.assign(this, { thought, counts, context });
    this.end(reason);
  }
}
