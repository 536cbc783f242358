"use strict";
// What went wrong stands on the page's root, where a test reads it.
const root = document.documentElement;
addEventListener("error", (event) => { root.dataset.errors = `${root.dataset.errors ?? ""}${event.message}\n`; });

const figures = JSON.parse(document.getElementById("figures").textContent);
const hidden = new Set();

function draw(figure) {
  const isTouch = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page
  const options = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };
  Plotly.newPlot(figure.id, figure.data, { ...figure.layout, autosize: true, dragmode: isTouch ? false : "zoom" }, options);
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
    const isShown = (trace) => (trace.meta?.jobs ?? [trace.meta?.job]).some((job) => !hidden.has(job));
    Plotly.restyle(figure.id, "visible", figure.data.map(isShown));
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
figures.forEach(draw);
root.dataset.drawn = String(figures.length);
