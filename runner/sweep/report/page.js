"use strict";
// What went wrong stands on the page's root, where a test reads it.
const root = document.documentElement;
addEventListener("error", (event) => { root.dataset.errors = `${root.dataset.errors ?? ""}${event.message}\n`; });

const figures = JSON.parse(document.getElementById("figures").textContent);
const hidden = new Set();

/** "var(--name)" anywhere in a figure becomes the theme's color. */
function themed(value, style) {
  if (typeof value === "string") {
    const name = /^var\((--[a-z0-9]+)\)$/.exec(value);
    return name ? style.getPropertyValue(name[1]).trim() : value;
  }
  if (Array.isArray(value)) return value.map((item) => themed(item, style));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item, style)]));
}

function titled(axis) {
  return { standoff: 12, ...axis?.title, font: { size: 12.5, color: "var(--muted)" } };
}

function draw() {
  const style = getComputedStyle(root);
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const axis = { gridcolor: "var(--grid)", zeroline: false, linecolor: "var(--line)", automargin: true };
  for (const figure of figures) {
    const layout = {
      ...figure.layout,
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: "var(--text)" },
      margin: { l: 56, r: 18, t: 14, b: 46, ...figure.layout.margin },
      xaxis: { ...axis, ...figure.layout.xaxis, title: titled(figure.layout.xaxis) },
      yaxis: { ...axis, ...figure.layout.yaxis, title: titled(figure.layout.yaxis) },
      hovermode: "closest",
      hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--line)", font: { color: "var(--text)" }, align: "left" },
      showlegend: figure.layout.showlegend ?? false,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", ...figure.layout.legend },
      dragmode: isTouch ? false : "zoom", // a finger scrolls the page
    };
    const data = figure.data.map((trace) => ({ ...trace, type: trace.type ?? "scatter", visible: !hidden.has(trace.meta?.job) }));
    const options = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };
    Plotly.react(figure.id, themed(data, style), themed(layout, style), options);
  }
}

function show(chips, isShown) {
  for (const chip of chips) {
    const job = Number(chip.dataset.job);
    chip.setAttribute("aria-pressed", String(isShown));
    if (isShown) hidden.delete(job); else hidden.add(job);
  }
}

function redraw() {
  for (const figure of figures.filter((each) => each.id.startsWith("plot-curve"))) {
    Plotly.restyle(figure.id, "visible", figure.data.map((trace) => !hidden.has(trace.meta?.job)));
  }
}

/** Cells sort by their data-value, numbers as numbers; what has none stays last. */
function sort(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  const head = heads[column];
  const isNumber = head.classList.contains("num") || column === 0;
  const before = head.getAttribute("aria-sort");
  const isDown = before === "ascending";
  heads.forEach((cell) => cell.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
  const key = (row) => row.cells[column].dataset.value;
  const compare = (a, b) => (isNumber ? number(a) - number(b) : a.localeCompare(b, "en", { numeric: true }));
  const rows = [...table.tBodies[0].rows].sort((one, other) => {
    const [a, b] = [key(one), key(other)];
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
    return isDown ? compare(b, a) : compare(a, b);
  });
  table.tBodies[0].append(...rows);
}

/** Python writes inf where JavaScript writes Infinity. */
function number(text) {
  return Number(text.replace("inf", "Infinity"));
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => head.addEventListener("click", () => sort(table, column)));
}
const chips = [...document.querySelectorAll(".chip")];
for (const chip of chips) {
  chip.addEventListener("click", () => { show([chip], chip.getAttribute("aria-pressed") === "false"); redraw(); });
}
for (const choice of document.querySelectorAll(".choice")) {
  choice.addEventListener("click", () => {
    const first = Number(choice.dataset.first);
    show(chips.slice(0, first), true);
    show(chips.slice(first), false);
    redraw();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
root.dataset.drawn = String(figures.length);
