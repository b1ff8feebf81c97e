// Shows one answer: its tokens, the author of each, and its rounds. Text of a model is inserted as text, never as HTML.

import { isMarkdown, made, Markdown } from "./markdown.js";

const SHOWN = 160; // the most rounds that are drawn

export class Reply {
  // `markdown`: true if the answer is Markdown; undefined if its text decides.
  constructor(root, markdown) {
    this.root = root;
    this.markdown = markdown;
    this.text = "";
    this.ends = []; // for each token of the text, its end; `drafted` is true if the draft wrote it
    this.drafted = [];
    this.thought = []; // the tokens of the reasoning
    this.proposals = []; // for each round, the numbers of proposed and of accepted tokens
    this.counts = { tokens: 0, drafted: 0, rounds: 0, proposing: 0, accepted: 0, seconds: 0 };
    this.thoughts = made("div", "thoughts", root);
    this.words = made("div", "words", root);
    const told = made("div", "told", root);
    this.rounds = made("div", "rounds", told);
    this.rounds.setAttribute("role", "img");
    this.figures = made("span", "figures", told);
    this.begun = 0;
    this.reason = "";
    this.context = 0; // the number of tokens of the dialogue up to the answer's end
    this.drawn = 0; // the number of tokens that are on the page
  }

  take(chunk) {
    if (chunk.usage) this.count(chunk.usage);
    for (const { delta, speculation, finish_reason: reason } of chunk.choices) {
      if (reason) this.reason = reason;
      if (speculation) this.round(speculation);
      else if (delta.content) this.round({ content: [{ text: delta.content, drafted: null }] });
    }
    this.draw();
  }

  round({ proposed, accepted, content = [], reasoning_content: thoughts = [] }) {
    for (const token of thoughts) this.think(token);
    for (const token of content) this.push(token);
    this.counts.drafted += [...thoughts, ...content].filter((token) => token.drafted).length;
    if (proposed === undefined) return; // text that was held back, of rounds already counted
    const now = performance.now();
    this.begun ||= now;
    this.counts.seconds = (now - this.begun) / 1000;
    this.counts.tokens += accepted + 1; // until the server reports its own count
    this.bar(proposed, accepted);
    this.figures.textContent = this.summary;
  }

  think(token) {
    this.thought.push(token);
    this.token(this.thoughts, token.text, token.drafted);
  }

  push({ text, drafted }) {
    this.text += text;
    this.ends.push(this.text.length);
    this.drafted.push(drafted);
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

  token(parent, text, drafted) {
    made("span", drafted ? "token drafted" : "token", parent).textContent = text;
  }

  // Markdown is drawn once per frame, other text as it arrives.
  draw() {
    if (this.markdown ??= isMarkdown(this.text) || undefined) {
      this.frame ??= requestAnimationFrame(() => this.drawMarkdown());
      return;
    }
    for (; this.drawn < this.ends.length; this.drawn++) {
      const text = this.text.slice(this.ends[this.drawn - 1] ?? 0, this.ends[this.drawn]);
      this.token(this.words, text, this.drafted[this.drawn]);
    }
  }

  drawMarkdown() {
    cancelAnimationFrame(this.frame);
    this.frame = undefined;
    if (!this.markdown) return;
    if (!this.blocks) {
      this.words.replaceChildren();
      this.words.classList.add("markdown");
      this.blocks = new Markdown(this.words);
    }
    try {
      this.blocks.show(this.text, this.ends, this.drafted);
    } catch {
      this.drawAs(false); // the parser fails on text that is nested too deep
    }
  }

  // Draws the text again, as Markdown or as plain text; if `markdown` is undefined, the text decides.
  drawAs(markdown) {
    this.markdown = markdown;
    this.blocks = null;
    this.drawn = 0;
    this.words.replaceChildren();
    this.words.classList.remove("markdown");
    this.draw();
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
      left: "the page was left before its end",
      broken: "it broke off",
    };
    return reasons[this.reason] ?? "";
  }

  end(reason) {
    this.reason = reason;
    this.root.classList.remove("writing");
    this.drawMarkdown();
    this.figures.textContent = this.summary;
    this.rounds.setAttribute("aria-label", this.summary);
  }

  // Returns the data from which `restore` draws the answer again.
  get kept() {
    const { text, ends, drafted, thought, proposals, counts, reason, context } = this;
    return { text, ends, drafted, thought, proposals, counts, reason, context };
  }

  restore(kept) {
    for (const token of kept.thought) this.think(token);
    for (const [proposed, accepted] of kept.proposals) this.bar(proposed, accepted);
    const { text, ends, drafted, counts, context } = kept;
    Object.assign(this, { text, ends, drafted, counts, context });
    this.draw();
    this.end(kept.reason);
  }
}
