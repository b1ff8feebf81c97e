// One answer on the page: its tokens, who wrote each, and its rounds. What a model says is only ever set as text.

const SHOWN = 160; // rounds

function made(name, className, parent) {
  const element = document.createElement(name);
  element.className = className;
  parent.append(element);
  return element;
}

export class Reply {
  constructor(root) {
    this.root = root;
    this.text = "";
    this.counts = { tokens: 0, drafted: 0, rounds: 0, proposing: 0, accepted: 0, seconds: 0 };
    this.thoughts = made("div", "thoughts", root);
    this.words = made("div", "words", root);
    const told = made("div", "told", root);
    this.rounds = made("div", "rounds", told);
    this.rounds.setAttribute("role", "img");
    this.figures = made("span", "", told);
    this.begun = 0;
    this.reason = "";
  }

  take(chunk) {
    if (chunk.usage) this.count(chunk.usage);
    for (const { delta, speculation, finish_reason: reason } of chunk.choices) {
      this.text += delta.content ?? "";
      if (reason) this.reason = reason;
      if (speculation) this.round(speculation);
    }
  }

  round({ proposed, accepted, content = [], reasoning_content: thoughts = [] }) {
    for (const token of thoughts) this.token(this.thoughts, token);
    for (const token of content) this.token(this.words, token);
    if (proposed === undefined) return; // text that was held back, of rounds already counted
    const now = performance.now();
    this.begun ||= now;
    this.counts.seconds = (now - this.begun) / 1000;
    this.counts.rounds += 1;
    this.counts.proposing += proposed > 0;
    this.counts.accepted += accepted;
    this.counts.drafted += [...thoughts, ...content].filter((token) => token.drafted).length;
    this.counts.tokens += accepted + 1; // until the server tells its own count
    const bar = made("i", "", this.rounds);
    made("b", "target", bar);
    for (let place = 0; place < proposed; place++) made("b", place < accepted ? "accepted" : "", bar);
    if (this.rounds.childElementCount > SHOWN) this.rounds.firstElementChild.remove();
    this.figures.textContent = this.summary;
  }

  // A text that is cut within a round has fewer tokens than the round accepted.
  count(usage) {
    this.counts.tokens = usage.completion_tokens;
    this.figures.textContent = this.summary;
  }

  token(parent, { text, drafted }) {
    made("span", drafted ? "token drafted" : "token", parent).textContent = text;
  }

  get summary() {
    const { tokens, rounds, proposing, accepted } = this.counts;
    const length = proposing ? `, acceptance length ${(1 + accepted / proposing).toFixed(2)}` : "";
    return `${tokens} tokens in ${rounds} rounds${length}${this.reason === "length" ? ", cut" : ""}`;
  }

  end() {
    this.root.classList.remove("writing");
    this.rounds.setAttribute("aria-label", this.summary);
  }
}
