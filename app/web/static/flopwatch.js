// What pages do beyond HTML and htmx. Pages are complete without it, but for plots.
//
//   <figure data-plot="/ui/jobs/17/samples">   draws the plot of that address's JSON, or of a script element's ("#id")
//   <pre data-log hx-sse:connect=…>            appends the events `log` of a job
//   <button data-copy="#id">                   copies the text of that element
//   <select data-plot-choice="#id">            options are the addresses of plots; the figure draws the chosen one
//   <form data-picked="job">                   enables its buttons if enough rows are picked that match data-of, counts
//                                              the picked rows, and names the oldest, with which the others are compared

import { drawPlots, clearPlot } from "./plots.js";
import "./panels.js";

// A refresh must not undo what a reader did: what is open stays open, what is drawn stays drawn.
htmx.registerExtension("flopwatch", {
  htmx_before_morph_attr: (element, detail) => !(detail.attrName === "open" && element.matches("details, dialog")),
  htmx_before_morph_node: (element, { oldNode, newNode }) => {
    if (!oldNode.matches?.("figure[data-plot]")) return true;
    if (oldNode.dataset.plot === newNode.dataset?.plot) return false;
    clearPlot(oldNode);
    return true;
  },
});

// A part of another page, such as a table in the page of its job, brings no title: this page keeps its own.
document.addEventListener("htmx:after:swap", ({ detail: { ctx } }) => {
  const from = ctx?.request?.action;
  if (from && new URL(from, window.location).pathname !== window.location.pathname) ctx.title = null;
});

document.addEventListener("htmx:after:swap", () => {
  drawPlots(document);
  countPicked();
});

// On a phone the names of pages are a row that scrolls: it begins where this page's name can be seen.
document.querySelector("body > header nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-copy]");
  if (!button) return;
  const source = document.querySelector(button.dataset.copy);
  await copy(source);
  const label = button.textContent;
  button.textContent = "Copied";
  window.setTimeout(() => { button.textContent = label; }, 1500);
});

// The clipboard's interface exists on HTTPS and on this host only; a selection can be copied everywhere.
async function copy(source) {
  const text = source.value ?? source.textContent;
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return;
    } catch {
      // refused: the old way is left
    }
  }
  window.getSelection().selectAllChildren(source);
  document.execCommand("copy");
}

// A live log: events come to the element as DOM events named after them.
document.addEventListener("log", (event) => {
  const log = event.target.closest?.("[data-log]");
  if (!log) return;
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  log.append(JSON.parse(event.detail.data).text ?? "");
  if (atEnd) log.scrollTop = log.scrollHeight;
});

function countPicked() {
  for (const form of document.querySelectorAll("form[data-picked]")) {
    const chosen = document.querySelectorAll(`input[name="${form.dataset.picked}"]:checked`);
    const picked = chosen.length;
    const oldest = Math.min(...Array.from(chosen, (box) => Number(box.value)));
    const order = picked > 1 ? `; to compare, ${oldest} is the baseline` : "";
    for (const output of form.querySelectorAll("output")) output.textContent = picked ? `${picked} picked${order}` : "";
    for (const button of form.querySelectorAll("button[data-least]")) {
      const of = Array.from(chosen).filter((box) => box.matches(button.dataset.of ?? "*")).length;
      button.disabled = of < button.dataset.least;
    }
  }
}

document.addEventListener("change", (event) => {
  countPicked();
  const choice = event.target.closest?.("select[data-plot-choice]");
  if (!choice) return;
  const figure = document.querySelector(choice.dataset.plotChoice);
  clearPlot(figure);
  figure.dataset.plot = choice.value;
  drawPlots(document);
});

for (const log of document.querySelectorAll("[data-log]")) log.scrollTop = log.scrollHeight;
countPicked();
