// Shows Markdown as elements of the page, in which each token still has its author. marked.esm.js parses, and this file
// makes the elements. No text of a model is ever used as HTML, and nothing is loaded: an image becomes a link.

import { copyButton, made } from "./elements.js";
import { Lexer } from "./marked.esm.js";

const LINK = /^(https?|mailto):/i;
const ENTITY = /(&(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z]\w{1,30});)/i;
// Signs of what a text is, the strongest first: true for Markdown, false for a program, which must be shown unchanged.
// Comments of programs also have bold words, links and lines that begin with #, so only a fence is stronger than code.
const SIGNS = [
  [/^ {0,3}(```|~~~)/m, true],
  [/^(import [\w.]+( as \w+)?;?|from [\w.]+ import .+|(async )?(def|class|func|fn|function) \w.*[:{])\r?\n/m, false],
  [/^((if|for|while|with) .+:|(print|console\.log)\(.*|#(include|!).*)\r?\n/m, false],
  [/^([^-*+>|\\\d\s].*[{;]|[\])}]+[;,]?|\{)\r?\n/m, false],
  [/(^|[\s(])\*\*[^\s*]([^*\n]*[^\s*])?\*\*/m, true],
  [/^\|?[ \t]*:?-{3,}:?[ \t]*\|/m, true],
  [/\]\(https?:/, true],
  [/^[\w.]+(\(.*\)|(\[.*\])? [-+*/|]?= .+)\r?\n/m, false], // formulas have the same form as assignments and calls
];

// Returns a function of a text that grows. It returns true if the text is Markdown, false if it is a program, and
// undefined if nothing shows it yet. A finished line is read once.
export function judge() {
  let from = 0;
  let strongest = SIGNS.length;
  return (text) => {
    const lines = text.slice(from);
    from = text.lastIndexOf("\n") + 1;
    const found = SIGNS.slice(0, strongest).findIndex(([sign]) => sign.test(lines));
    if (found >= 0) strongest = found;
    return SIGNS[strongest]?.[1];
  };
}

// A part of the answer: its text, and the index in the answer of each of its characters.
class Stretch {
  constructor(text, places) {
    this.text = text;
    this.places = places;
  }

  place(at) {
    return this.places[Math.max(0, Math.min(at, this.places.length - 1))] ?? 0;
  }

  slice(from, to = this.text.length) {
    return new Stretch(this.text.slice(from, to), this.places.subarray(from, to));
  }

  // Returns the part `text` of this stretch, which lacks the beginnings of lines: quotes, bullets, indentation.
  lines(text) {
    const places = new Int32Array(text.length);
    const own = this.text.split("\n");
    const starts = [0];
    for (const line of own) starts.push(starts.at(-1) + line.length + 1);
    let row = 0;
    let done = 0;
    for (const line of text.split("\n")) {
      const bare = line.trim();
      let at = row;
      while (at < own.length && !own[at].includes(bare)) at++;
      if (at < own.length) row = at;
      const found = own[row] ?? "";
      const skipped = found.endsWith(line) ? found.length - line.length : found.lastIndexOf(bare) - line.indexOf(bare);
      const begun = (starts[row] ?? this.text.length) + skipped;
      for (let i = 0; i <= line.length && done + i < text.length; i++) places[done + i] = this.place(begun + i);
      done += line.length + 1;
      row++;
    }
    return new Stretch(text, places);
  }

  // Returns the part `text` of this stretch, which lacks single characters (bars of a table, backslashes), and the index
  // in this stretch after that part.
  letters(text) {
    const places = new Int32Array(text.length);
    let at = -1;
    for (let i = 0; i < text.length; i++) {
      at = Math.max(at, this.text.indexOf(text[i], at + 1));
      places[i] = this.place(at);
    }
    return [new Stretch(text, places), at + 1];
  }
}

const rawOf = (tokens) => tokens.map(({ raw }) => raw).join("");

// Makes and updates the elements of one answer.
export class Markdown {
  constructor(root) {
    this.root = root;
    this.blocks = []; // the blocks on the page: the source and the element of each
  }

  // Shows the answer so far. For each token, `ends` has the end of its text, and `drafted` is true if the draft wrote
  // it. Unchanged blocks are kept. Throws if the parser fails.
  show(text, ends, drafted) {
    this.ends = ends;
    this.drafted = drafted;
    const source = text.replace(/\r/g, " "); // keeps the length
    const tokens = new Lexer().lex(source);
    const links = Object.keys(tokens.links).length;
    const kept = links === this.links ? tokens.findIndex(({ raw }, number) => raw !== this.blocks[number]?.raw) : 0;
    this.links = links;
    if (kept < 0) return; // nothing has changed
    for (const { element } of this.blocks.splice(kept)) element?.remove();
    let from = rawOf(tokens.slice(0, kept)).length;
    for (const token of tokens.slice(kept)) {
      const places = Int32Array.from({ length: token.raw.length }, (_, at) => from + at);
      const element = document.createDocumentFragment();
      this.block(token, new Stretch(token.raw, places), element);
      this.blocks.push({ raw: token.raw, element: element.firstChild });
      this.root.append(element);
      from += token.raw.length;
    }
  }

  each(tokens, stretch, draw) {
    let at = 0;
    for (const token of tokens) {
      at = Math.max(at, stretch.text.indexOf(token.raw, at));
      draw(token, stretch.slice(at, at + token.raw.length));
      at += token.raw.length;
    }
  }

  within(tokens, stretch, parent) {
    this.each(tokens, stretch.lines(rawOf(tokens)), (token, part) => this.block(token, part, parent));
  }

  line(tokens, stretch, parent) {
    this.each(tokens, stretch, (token, part) => this.inline(token, part, parent));
  }

  block(token, stretch, parent) {
    const { type, text } = token;
    if (type === "space" || type === "def") return;
    if (type === "hr") made("hr", "", parent);
    else if (type === "heading") this.line(token.tokens, stretch.lines(text), made(`h${Math.min(6, token.depth + 1)}`, "", parent));
    else if (type === "paragraph") this.line(token.tokens, stretch.lines(text), made("p", "", parent));
    else if (type === "text") this.line(token.tokens, stretch, made("div", "", parent));
    else if (type === "blockquote") this.within(token.tokens, stretch, made("blockquote", "", parent));
    else if (type === "list") this.list(token, stretch, parent);
    else if (type === "table") this.table(token, stretch, parent);
    else if (type === "code") {
      const box = made("div", "code", parent);
      const shown = made("pre", "", box);
      shown.tabIndex = 0; // so that the keyboard can scroll it
      const fence = token.codeBlockStyle === "indented" ? 0 : stretch.text.indexOf("\n") + 1;
      this.say(stretch.slice(fence).lines(text), made("code", "", shown));
      copyButton(box, () => text);
    } else if (type === "checkbox") this.inline(token, stretch, parent);
    else this.say(stretch, made("p", "", parent)); // HTML, as it was written
  }

  list({ ordered, start, items }, stretch, parent) {
    const list = made(ordered ? "ol" : "ul", "", parent);
    if (ordered) list.start = start;
    this.each(items, stretch, (item, part) => this.within(item.tokens, part, made("li", "", list)));
  }

  table({ header, rows, align }, stretch, parent) {
    const table = made("table", "", made("div", "table", parent));
    const places = stretch.text.split("\n", 2).map(({ length }) => length + 1);
    let at = 0;
    for (const cells of [header, ...rows]) {
      const row = made("tr", "", made(cells === header ? "thead" : "tbody", "", table));
      cells.forEach((cell, column) => {
        const [part, length] = stretch.slice(at).letters(cell.text);
        const box = made(cells === header ? "th" : "td", align[column] ?? "", row);
        this.line(cell.tokens, part, box);
        at += length;
      });
      if (cells === header) at = places[0] + places[1]; // after the line of dashes
    }
  }

  inline(token, stretch, parent) {
    const { type, raw, text } = token;
    const label = () => stretch.slice(raw.indexOf(text), raw.indexOf(text) + text.length);
    if (type === "br" || (type === "html" && /^<br\s*\/?>$/i.test(raw))) made("br", "", parent);
    else if (type === "strong" || type === "em" || type === "del") {
      const marks = (raw.length - text.length) / 2;
      this.line(token.tokens, stretch.slice(marks, raw.length - marks), made(type, "", parent));
    } else if (type === "codespan") {
      const [ticks] = /^`+/.exec(raw);
      const from = Math.max(ticks.length, raw.indexOf(text, ticks.length));
      this.say(new Stretch(text, stretch.slice(from, from + text.length).places), made("code", "", parent));
    } else if (type === "link") this.line(token.tokens, label(), this.link(token.href, parent));
    else if (type === "image") this.say(text ? label() : stretch, this.link(token.href, parent));
    else if (type === "checkbox") {
      const box = made("input", "", parent);
      Object.assign(box, { type: "checkbox", disabled: true, checked: token.checked });
      box.ariaLabel = token.checked ? "done" : "to do";
    } else if (type === "escape") this.say(stretch.slice(1), parent);
    else if (type === "html") this.say(stretch, parent);
    else this.entities(stretch, parent);
  }

  link(href, parent) {
    if (!LINK.test(href)) return made("span", "", parent);
    return Object.assign(made("a", "", parent), { href, target: "_blank", rel: "noopener noreferrer" });
  }

  entities(stretch, parent) {
    let at = 0;
    for (const text of stretch.text.split(ENTITY)) {
      const part = stretch.slice(at, (at += text.length));
      if (!ENTITY.test(text)) this.say(part, parent);
      else this.say(part.letters(new DOMParser().parseFromString(text, "text/html").body.textContent)[0], parent);
    }
  }

  // Appends a text, split into its tokens.
  say({ text, places }, parent) {
    let from = 0;
    while (from < text.length) {
      const token = this.tokenAt(places[from]);
      let to = from + 1;
      while (to < text.length && places[to] < this.ends[token] && places[to] >= (this.ends[token - 1] ?? 0)) to++;
      made("span", this.drafted[token] ? "token drafted" : "token", parent).textContent = text.slice(from, to);
      from = to;
    }
  }

  tokenAt(place) {
    let low = 0;
    let high = this.ends.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > place) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}
