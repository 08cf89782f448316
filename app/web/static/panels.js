// What panels of jobs do beyond plots.
//
//   <figure data-stacks="/ui/jobs/17/stacks">           draws a flame graph of that address's [name, µs, [callees]]
//   <button data-perfetto="https://…" data-trace="/…">  opens Perfetto and hands it the trace

const ROW = 18;
const MIN_WIDTH = 0.5;
const CHARACTER = 6.7;
const MAX_ROWS = 100;

const nearby = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    nearby.unobserve(target);
    load(target).catch((error) => {
      const note = document.createElement("p");
      note.className = "plot-note quiet";
      note.textContent = `The flame graph could not be drawn: ${error.message}.`;
      target.replaceChildren(note);
      target.dataset.drawn = "failed";
    });
  }
}, { rootMargin: "400px" });

export function drawFlames(root) {
  for (const figure of root.querySelectorAll("figure[data-stacks]:not([data-drawn])")) {
    figure.dataset.drawn = "waiting";
    nearby.observe(figure);
  }
}

async function load(figure) {
  const response = await fetch(figure.dataset.stacks, { headers: { Accept: "application/json" } });
  const body = await response.json();
  if (!response.ok) throw new Error(body.detail ?? response.statusText);
  new Flames(figure, body);
  figure.dataset.drawn = "yes";
}

function node(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function milliseconds(microseconds) {
  return `${Number((microseconds / 1000).toPrecision(4))} ms`;
}

class Flames {
  constructor(figure, tree) {
    this.root = frame(tree, null, 0);
    this.focus = this.chosen = this.root;
    this.words = "";
    this.picture = svg("svg", { role: "img", "aria-label": figure.getAttribute("aria-label") ?? "Flame graph" });
    this.field = node("div", { class: "flames-field", tabindex: "0", role: "group", "aria-label": "Frames: walk with the arrow keys" });
    this.field.append(this.picture);
    this.status = node("p", { class: "flames-status", role: "status" });
    const search = node("input", { type: "search", placeholder: "matmul", "aria-label": "Highlight frames with" });
    this.all = node("button", { type: "button", class: "plain" }, "Show all");
    const bar = node("div", { class: "filters" }, node("label", {}, "Highlight ", search), this.all);
    figure.replaceChildren(bar, this.status, this.field, numbers(this.root));
    search.addEventListener("input", () => { this.words = search.value.trim().toLowerCase(); this.draw(); });
    this.all.addEventListener("click", () => this.widen(this.root));
    this.field.addEventListener("keydown", (event) => this.walk(event));
    this.picture.addEventListener("click", (event) => this.at(event, (one) => this.widen(one)));
    this.picture.addEventListener("pointermove", (event) => this.at(event, (one) => this.describe(one)));
    this.picture.addEventListener("pointerleave", () => this.describe(this.chosen));
    new ResizeObserver(() => { if (this.picture.parentNode.clientWidth !== this.width) this.draw(); }).observe(this.field);
    this.draw();
  }

  at(event, act) {
    const one = this.frames.get(event.target.closest("g"));
    if (one) act(one);
  }

  widen(one) {
    this.focus = this.chosen = one;
    this.draw();
  }

  walk(event) {
    const siblings = this.chosen.parent?.callees ?? [this.chosen];
    const place = siblings.indexOf(this.chosen);
    const next = {
      ArrowDown: this.chosen.callees[0],
      ArrowUp: this.chosen.parent,
      ArrowLeft: siblings[place - 1],
      ArrowRight: siblings[place + 1],
    }[event.key];
    if (event.key === "Escape") this.widen(this.root);
    else if (event.key === "Enter") this.widen(this.chosen);
    else if (next) {
      this.chosen = next;
      if (next.depth < this.focus.depth) this.focus = next;
      this.draw();
    } else return;
    event.preventDefault();
  }

  describe(one) {
    const share = (100 * one.time) / (this.root.time || 1);
    this.status.textContent = `${one.name}: ${milliseconds(one.time)}, ${share.toFixed(1)} % of all`
      + (this.words ? `; “${this.words}”: ${this.matching.toFixed(1)} % of all` : "");
  }

  // The frames above the focus have its whole width, so that one sees where it is, and can go back.
  draw() {
    this.width = this.field.clientWidth || 800;
    this.frames = new Map();
    this.picture.replaceChildren();
    const boxes = [];
    for (let one = this.focus.parent; one; one = one.parent) boxes.push([one, 0, this.width]);
    const waiting = [[this.focus, 0, this.width]];
    while (waiting.length) {
      const [one, left, width] = waiting.pop();
      boxes.push([one, left, width]);
      let at = left;
      for (const callee of one.callees) {
        const wide = (width * callee.time) / (one.time || 1);
        if (wide >= MIN_WIDTH) waiting.push([callee, at, wide]);
        at += wide;
      }
    }
    let depth = 0;
    for (const [one, left, width] of boxes) {
      depth = Math.max(depth, one.depth);
      this.picture.append(this.box(one, left, width));
    }
    const height = (depth + 1) * ROW;
    for (const [name, value] of Object.entries({ width: this.width, height, viewBox: `0 0 ${this.width} ${height}` })) {
      this.picture.setAttribute(name, value);
    }
    this.all.disabled = this.focus === this.root;
    this.matching = this.words ? (100 * matching(this.root, this.words)) / (this.root.time || 1) : 0;
    this.describe(this.chosen);
  }

  box(one, left, width) {
    const matches = this.words && one.name.toLowerCase().includes(this.words);
    const group = svg("g", {
      class: ["flame", `flame-${kind(one.name)}`, matches ? "flame-match" : "", one === this.chosen ? "flame-chosen" : ""].join(" "),
    });
    const y = one.depth * ROW;
    group.append(svg("rect", { x: left, y, width: Math.max(width - 0.5, 0.3), height: ROW - 1, rx: 1 }));
    const room = Math.floor((width - 6) / CHARACTER);
    if (room > 2) {
      const text = svg("text", { x: left + 3, y: y + 12.5 });
      text.textContent = one.name.length <= room ? one.name : `${one.name.slice(0, room - 1)}…`;
      group.append(text);
    }
    this.frames.set(group, one);
    return group;
  }
}

function frame([name, time, callees], parent, depth) {
  const one = { name, time, parent, depth, callees: [] };
  one.callees = callees.map((callee) => frame(callee, one, depth + 1));
  return one;
}

function kind(name) {
  if (name.includes(".py(") || /^(<|nn\.Module)/.test(name)) return "python";
  return /^(void|Memcpy|Memset|triton_)|kernel|gemm|nvjet/.test(name) ? "kernel" : "operator";
}

// The time under frames whose names have the words; a frame below another one that has them counts once.
function matching(one, words) {
  if (one.name.toLowerCase().includes(words)) return one.time;
  return one.callees.reduce((sum, callee) => sum + matching(callee, words), 0);
}

// The frames that take the most time themselves: for those who cannot see the picture. Made when it is opened.
function numbers(root) {
  const details = node("details", { class: "plot-data" }, node("summary", {}, "Frames by their own time"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.childElementCount > 1) return;
    const times = new Map();
    const waiting = [root];
    while (waiting.length) {
      const one = waiting.pop();
      const own = one.time - one.callees.reduce((sum, callee) => sum + callee.time, 0);
      times.set(one.name, (times.get(one.name) ?? 0) + own);
      waiting.push(...one.callees);
    }
    const ranked = [...times].sort((left, right) => right[1] - left[1]).filter(([, own]) => own > 0).slice(0, MAX_ROWS);
    const body = node("tbody", {}, ...ranked.map(([name, own]) => node("tr", {},
      node("td", { class: "long" }, name),
      node("td", { class: "number" }, milliseconds(own)),
      node("td", { class: "number" }, `${((100 * own) / (root.time || 1)).toFixed(1)} %`))));
    const head = node("thead", {}, node("tr", {},
      node("th", { scope: "col" }, "Frame"), node("th", { scope: "col", class: "number" }, "Own time"), node("th", { scope: "col", class: "number" }, "Share")));
    details.append(node("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Frames by their own time" }, node("table", {}, head, body)));
  });
  return details;
}

// Perfetto's protocol (perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui): PING its window until it answers
// PONG, then post the trace. Both sides look at the other's origin.
const PING_MS = 200;
const PATIENCE_MS = 60_000;

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-perfetto]");
  if (!button) return;
  const report = (text) => { button.parentElement.querySelector("output").textContent = text; };
  const viewer = window.open(button.dataset.perfetto, "_blank");
  if (!viewer) {
    report("The browser did not open the tab: let this page open pop-ups.");
    return;
  }
  report("Handing the trace to Perfetto …");
  try {
    const answered = pong(viewer, new URL(button.dataset.perfetto).origin);
    const response = await fetch(button.dataset.trace);
    if (!response.ok) throw new Error(response.statusText);
    const buffer = await response.arrayBuffer();
    const origin = await answered;
    const fileName = button.dataset.trace.split("/").pop();
    viewer.postMessage({ perfetto: { buffer, title: button.dataset.title, fileName } }, origin);
    report("Perfetto has the trace.");
  } catch (error) {
    report(`${error.message}. Download the trace, and open it there.`);
  }
});

function pong(viewer, origin) {
  return new Promise((resolve, reject) => {
    const began = performance.now();
    const end = (settle, value) => {
      window.clearInterval(timer);
      window.removeEventListener("message", listen);
      settle(value);
    };
    const listen = (event) => {
      if (event.source === viewer && event.origin === origin && event.data === "PONG") end(resolve, origin);
    };
    const timer = window.setInterval(() => {
      if (viewer.closed) end(reject, new Error("The tab was closed"));
      else if (performance.now() - began > PATIENCE_MS) end(reject, new Error("Perfetto does not answer"));
      else viewer.postMessage("PING", origin);
    }, PING_MS);
    window.addEventListener("message", listen);
  });
}

document.addEventListener("htmx:after:swap", () => drawFlames(document));
drawFlames(document);
