// Runs the status page's script on a small document, without a browser. Reads a JSON list of {path, answer} from stdin:
// the path of the page with its query, and the JSON response or the error text. Prints a JSON list of {title, html, asked}.

import { readFileSync } from "node:fs";

const EMPTY_ELEMENTS = new Set(["input", "link", "meta"]);
const escaped = (text) => text.replace(/[&<>"]/g, (each) => `&#${each.codePointAt(0)};`);

class Text {
  constructor(text) { this.text = text; }
  get html() { return escaped(this.text); }
  cloneNode() { return new Text(this.text); }
}

class Element {
  constructor(name) {
    this.name = name;
    this.attributes = new Map();
    this.childNodes = [];
  }

  setAttribute(name, value) { this.attributes.set(name, String(value)); }
  getAttribute(name) { return this.attributes.get(name) ?? null; }
  append(...nodes) {
    for (const each of nodes) this.childNodes.push(each instanceof Element ? each : new Text(String(each)));
  }
  replaceChildren(...nodes) { this.childNodes = []; this.append(...nodes); }
  set textContent(text) { this.replaceChildren(text); }
  set hidden(hidden) { if (hidden) this.setAttribute("hidden", ""); else this.attributes.delete("hidden"); }
  set value(text) { this.setAttribute("value", text); }
  get children() { return this.childNodes.filter((each) => each instanceof Element); }
  get descendants() { return this.children.flatMap((each) => [each, ...each.descendants]); }
  cloneNode() {
    const made = new Element(this.name);
    made.attributes = new Map(this.attributes);
    return made;
  }
  contains(other) { return this.descendants.includes(other); }
  isEqualNode(other) { return this.html === other.html; }
  querySelectorAll(name) { return this.descendants.filter((each) => each.name === name); }
  addEventListener() {}
  get html() {
    const attributes = [...this.attributes].map(([name, value]) => ` ${name}="${escaped(value)}"`).join("");
    const inner = this.childNodes.map((each) => each.html).join("");
    return `<${this.name}${attributes}>${inner}${EMPTY_ELEMENTS.has(this.name) ? "" : `</${this.name}>`}`;
  }
}

// The page's own markup is regular: every attribute is quoted or has no value.
function parsed(markup) {
  const root = new Element("root"), open = [root];
  for (const [, end, name, attributes, text] of markup.matchAll(/<(\/?)!?([a-z0-9]+)([^>]*)>|([^<]+)/g)) {
    if (text !== undefined) open.at(-1).append(text);
    else if (end) open.pop();
    else {
      const made = new Element(name);
      for (const [, key, value] of attributes.matchAll(/([a-z-]+)(?:="([^"]*)")?/g)) made.setAttribute(key, value ?? "");
      open.at(-1).append(made);
      if (!EMPTY_ELEMENTS.has(name) && name !== "doctype") open.push(made);
    }
  }
  return root;
}

const [folder] = process.argv.slice(2);
const markup = readFileSync(`${folder}/page.html`, "utf-8"), script = readFileSync(`${folder}/page.js`, "utf-8");
const rendered = [];
for (const [number, { path, answer, date }] of JSON.parse(readFileSync(0, "utf-8")).entries()) {
  const root = parsed(markup), all = () => root.descendants;
  const asked = [];
  globalThis.location = new URL(path, "http://proxy:8080");
  globalThis.document = {
    title: "", hidden: false, activeElement: null,
    createElement: (name) => new Element(name),
    createElementNS: (_, name) => new Element(name),
    getElementById: (id) => all().find((each) => each.getAttribute("id") === id),
    addEventListener() {},
  };
  globalThis.fetch = async (source) => {
    asked.push(source);
    if (answer === null) throw new TypeError("fetch failed");
    const failed = typeof answer === "string";
    return {
      ok: !failed, status: failed ? 500 : 200, headers: new Headers({ date }),
      json: async () => answer, text: async () => answer,
    };
  };
  const timers = [];
  globalThis.setTimeout = (action) => timers.push(action);
  await import(`data:text/javascript,${encodeURIComponent(`${script}// ${number}`)}`); // the number: not from the cache
  while (!timers.length) await new Promise(setImmediate);
  rendered.push({ title: document.title, html: root.html, asked });
}
console.log(JSON.stringify(rendered));
