// Draws every <figure data-plot="ADDRESS or #ID of a script element"> by Plotly: on the server's pages, and in exported
// files, which contain Plotly and this script.
//
// The JSON is {"data": [traces], "layout": {…}}, in Plotly's terms; a text "var(--bad)" anywhere in it is the value of
// that CSS variable, so that plots follow the page into the dark. The figure gets a picture with its caption as name,
// buttons that make the axes named in data-log ("x", "y", "x y") logarithmic, the JSON's "note" and a table of the
// numbers.

const IS_EXPORTED = "Plotly" in window; // an exported file contains it
const COLOURS = 8;
// With more, Plotly labels each digit of a range of one to two powers of ten: those above 5 overlap on a short axis.
const LOG_NTICKS = { x: 0, y: 3 };
const LOG_TICKS = ",~r"; // Plotly writes the ticks between powers of ten as "2" and "5" unless a format is set
const NARROW = 520;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia(`(width < ${NARROW}px)`);
const MIN_CELL = 5; // pixels of a cell that has gaps around it
const LETTER = 8; // pixels of a letter in a cell of a heat map, and between two cells' texts
let library;

function plotly() {
  if (IS_EXPORTED) return window.Plotly;
  library ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = document.querySelector("script[data-plotly]").dataset.plotly;
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("Plotly could not be loaded"));
    document.head.append(script);
  });
  return library;
}

// A page's plots are drawn when they are seen: there may be many, and Plotly takes a phone a second.
const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    drawOrExplain(target);
  }
});

// The latest drawing of each figure: one that was cleared meanwhile, as when theme and width change at once, ends.
const drawings = new WeakMap();

function drawOrExplain(figure) {
  const drawing = {};
  drawings.set(figure, drawing);
  draw(figure, () => drawings.get(figure) === drawing).catch((error) => {
    if (drawings.get(figure) === drawing) showMessage(figure, `This plot could not be drawn: ${error.message}.`);
  });
}

export function drawPlots(root) {
  for (const figure of root.querySelectorAll("figure[data-plot]:not([data-drawn])")) {
    figure.dataset.drawn = "waiting";
    if (figure.dataset.room) figure.style.minHeight = `${figure.dataset.room}px`; // what is below must not move
    seen.observe(figure);
  }
}

// Figures whose numbers a reader has opened: they are open again when the figure is drawn anew.
const opened = new WeakSet();

export function clearPlot(figure) {
  seen.unobserve(figure);
  drawings.delete(figure);
  if (figure.querySelector(".plot-data[open]")) opened.add(figure);
  const picture = figure.querySelector(".plot");
  if (picture && window.Plotly) window.Plotly.purge(picture);
  for (const part of figure.querySelectorAll(".plot, .plot-tools, .plot-data, .plot-note")) part.remove();
  delete figure.dataset.drawn;
}

for (const query of [dark, narrow]) {
  query.addEventListener("change", () => {
    for (const figure of document.querySelectorAll("figure[data-drawn]")) clearPlot(figure);
    drawPlots(document);
  });
}

async function load(source) {
  if (source.startsWith("#")) return JSON.parse(document.querySelector(source).textContent);
  const response = await fetch(source, { headers: { Accept: "application/json" } });
  const body = await response.json();
  if (!response.ok) throw new Error(body.detail ?? response.statusText);
  return body;
}

async function draw(figure, isLatest) {
  const [content, Plotly] = await Promise.all([load(figure.dataset.plot), plotly()]);
  await new Promise((resolve) => window.setTimeout(resolve)); // the page answers between Plotly's start and the drawing
  if (!isLatest()) return;
  if (!content.data.length) {
    showMessage(figure, content.empty ?? "There is nothing to draw.");
    figure.dataset.drawn = "empty";
    return;
  }
  const caption = figure.querySelector("figcaption");
  const picture = document.createElement("div");
  picture.className = "plot";
  picture.setAttribute("role", "group"); // no image: it holds the buttons of Plotly's bar
  picture.setAttribute("aria-label", figure.getAttribute("aria-label") ?? caption?.textContent.trim() ?? "Plot");
  figure.prepend(picture);
  figure.style.minHeight = "";
  const { data, layout } = themed(content);
  const named = data.filter((trace) => trace.name && trace.showlegend !== false).length;
  // On a phone the legend has a line for each series, above the plot.
  if (picture.clientWidth < NARROW && layout.showlegend !== false && named > 1) layout.height += 20 * Math.min(named, 12);
  fitHeatMap(data, layout, picture.clientWidth);
  // Room for Plotly's buttons beside the plot, in two columns where it is low.
  if (picture.clientWidth >= NARROW) layout.margin.r = Math.max(layout.margin.r, layout.height < 300 ? 72 : 44);
  if (picture.clientWidth < NARROW && layout.annotations) turnNames(layout);
  picture.style.minHeight = `${layout.height}px`;
  await Plotly.newPlot(picture, data, layout, {
    responsive: true,
    displaylogo: false,
    showSendToCloud: false, // Plotly's own "Share chart" uploads the plot
    plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    toImageButtonOptions: { format: "svg", filename: document.title },
  });
  if (!isLatest()) return;
  // A point with a second value in its customdata leads there: to the job that measured it.
  picture.on("plotly_click", ({ points }) => {
    const to = points[0]?.customdata?.[1];
    if (!IS_EXPORTED && typeof to === "string" && to.startsWith("/ui/")) window.location.assign(to);
  });
  if (content.note) picture.after(note(`${content.note}.`));
  const details = numbers(content, picture);
  figure.append(tools(figure, picture, Plotly, layout), details);
  details.open = opened.delete(figure);
  figure.dataset.drawn = "yes";
}

// On a phone the names above a plot would stand over each other: they stand upright, and the legend above them.
function turnNames(layout) {
  const room = 60;
  layout.height += room;
  layout.margin.t += room;
  for (const name of layout.annotations) Object.assign(name, { textangle: -90, xanchor: "left" });
  layout.legend.y = 1 + (room + 10) / (layout.height - layout.margin.t - layout.margin.b);
}

// On a phone the colours of a heat map stand below it. Where a cell is narrower than its text, no cell has one: who
// points at a cell sees its number. Where cells are narrow, there are no gaps between them, which would leave nothing.
function fitHeatMap(data, layout, width) {
  const maps = data.filter((trace) => trace.type === "heatmap");
  if (!maps.length) return;
  const isNarrow = width < NARROW;
  if (isNarrow) layout.height += 80;
  const room = (width - (isNarrow ? 80 : 190)) / Math.max(maps[0].x.length, 1);
  for (const trace of maps) {
    const longest = Math.max(0, ...(trace.text ?? []).flat().map((text) => text.length));
    if ((longest + 1) * LETTER > room) delete trace.texttemplate;
    if (room < MIN_CELL) trace.xgap = 0;
    if (layout.height / 2 / Math.max(trace.y.length, 1) < MIN_CELL) trace.ygap = 0;
    if (isNarrow && trace.colorbar) {
      const title = { ...trace.colorbar.title, side: "bottom" };
      Object.assign(trace.colorbar, { orientation: "h", yref: "container", y: 0, yanchor: "bottom", title });
    }
  }
}

function showMessage(figure, text) {
  figure.prepend(note(text));
  figure.dataset.drawn = "failed";
}

function note(text) {
  const line = document.createElement("p");
  line.className = "plot-note quiet";
  line.textContent = text;
  return line;
}

function themed(content) {
  const style = window.getComputedStyle(document.documentElement);
  // A computed style gives light-dark(…) as it is written; a colour of an element is resolved.
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const variable = (name) => {
    const value = style.getPropertyValue(name).trim();
    probe.style.color = "";
    probe.style.color = value;
    return probe.style.color ? window.getComputedStyle(probe).color : value;
  };
  const resolved = (value) => {
    if (typeof value === "string") return value.replace(/var\((--[\w-]+)\)/g, (_, name) => variable(name));
    if (Array.isArray(value)) return value.every((one) => typeof one === "number") ? value : value.map(resolved);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, resolved(inner)]));
    }
    return value;
  };
  const text = variable("--text");
  const line = variable("--line");
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, ticks: "outside", automargin: true, exponentformat: "SI" };
  const given = resolved(content.layout ?? {});
  const layout = {
    height: 340,
    margin: { l: 56, r: given.height < 220 ? 60 : 36, t: 16, b: 44 }, // the buttons are at the right, in two columns if it is low
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: text, family: style.getPropertyValue("font-family") || "system-ui, sans-serif", size: 13 },
    colorway: Array.from({ length: COLOURS }, (_, number) => variable(`--plot-${number + 1}`)),
    hoverlabel: { bgcolor: variable("--raised"), bordercolor: line, font: { color: text }, namelength: -1 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, xanchor: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: variable("--quiet"), activecolor: text, orientation: "v" },
    ...given,
  };
  for (const name of new Set(["xaxis", "yaxis", ...Object.keys(given).filter((key) => /^[xy]axis\d*$/.test(key))])) {
    layout[name] = { ...axis, ...given[name] };
    if (layout[name].type === "log") {
      layout[name].tickformat ??= LOG_TICKS;
      layout[name].nticks ??= LOG_NTICKS[name[0]];
    }
    // Plotly turns labels that overlap: upwards, so that the last is not cut off; spaces make those overlap that touch.
    if (name[0] === "x") {
      layout[name].autotickangles = [0, -45];
      if (layout[name].ticktext) layout[name].ticktext = layout[name].ticktext.map((label) => `\u00a0${label}\u00a0`);
    }
    if (narrow.matches && layout[name].type === "date") layout[name].nticks = 3;
    // It is centred below the plot, beside which a phone has long names of rows: what is wider than the plot is cut off.
    if (narrow.matches && name[0] === "x" && layout[name].title) layout[name].title = { ...layout[name].title, font: { size: 10 } };
  }
  const data = resolved(content.data);
  for (const { type, marker } of data) if (type === "bar" && marker?.colorscale) marker.color = marker.color.map((value) => blended(marker, value));
  probe.remove();
  return { data, layout };
}

// Plotly takes a bar's number for the colour of its text, and warns.
function blended({ colorscale, cmin, cmax }, value) {
  const at = (value - cmin) / (cmax - cmin);
  const next = Math.max(1, colorscale.findIndex(([place]) => place >= at));
  const [[low, one], [high, other]] = colorscale.slice(next - 1, next + 1);
  const [from, to] = [one, other].map((colour) => colour.match(/[\d.]+/g).map(Number));
  return `rgb(${from.slice(0, 3).map((part, index) => part + ((at - low) / (high - low)) * (to[index] - part))})`;
}

function tools(figure, picture, Plotly, layout) {
  const bar = document.createElement("div");
  bar.className = "plot-tools";
  for (const name of (figure.dataset.log ?? "").split(/\s+/).filter(Boolean)) {
    if (layout[`${name}axis`].type === "category") continue;
    const label = document.createElement("label");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = layout[`${name}axis`].type === "log";
    box.addEventListener("change", () => {
      const type = box.checked ? "log" : "linear";
      Plotly.relayout(picture, {
        [`${name}axis.type`]: type,
        [`${name}axis.autorange`]: true,
        [`${name}axis.tickformat`]: box.checked ? LOG_TICKS : null,
        [`${name}axis.nticks`]: box.checked ? LOG_NTICKS[name] : 0,
      });
    });
    label.append(box, ` logarithmic ${name}`);
    bar.append(label);
  }
  return bar;
}

// The same numbers for those who cannot see the plot, or want to copy them. Made when it is opened.
function numbers(content, picture) {
  const details = document.createElement("details");
  details.className = "plot-data";
  const summary = document.createElement("summary");
  summary.textContent = "Numbers of this plot";
  details.append(summary);
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(table(content, picture.getAttribute("aria-label")));
  });
  return details;
}

const MAX_ROWS = 2000;

function table(content, name) {
  const { columns, rows, number = rows.length } = content.table ?? tabulated(content);
  const region = document.createElement("div");
  region.className = "scroll tall";
  region.tabIndex = 0;
  region.setAttribute("role", "region");
  region.setAttribute("aria-label", `Numbers of: ${name}`);
  const element = document.createElement("table");
  const head = element.createTHead().insertRow();
  for (const column of columns) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = column;
    head.append(cell);
  }
  const body = element.createTBody();
  for (const row of rows.slice(0, MAX_ROWS)) {
    const line = body.insertRow();
    for (const value of row) {
      const cell = line.insertCell();
      cell.textContent = shown(value);
      if (typeof value === "number") cell.className = "number";
    }
  }
  region.append(element);
  if (number > Math.min(rows.length, MAX_ROWS)) {
    const note = document.createElement("p");
    note.className = "quiet";
    note.textContent = `The first ${Math.min(rows.length, MAX_ROWS)} of ${number} rows.`;
    region.append(note);
  }
  return region;
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  // A whole number may be a coordinate, which keeps all its digits.
  const isFraction = typeof value === "number" && !Number.isInteger(value);
  return String(isFraction ? Number(value.toPrecision(5)) : value);
}

// The numbers of a figure that brings no table.
function tabulated({ data, layout }) {
  const title = (letter) => layout[`${letter}axis`]?.title?.text || letter;
  const rows = data.flatMap(({ name, x, y }) => y.map((value, at) => [name, x?.[at] ?? at, value]));
  return { columns: ["series", title("x"), title("y")], rows };
}

drawPlots(document);
