"use strict";

const value = (row, column) => {
  const cell = row.cells[column];
  if (!cell || cell.classList.contains("reason")) return null;
  if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
  const words = cell.textContent.trim();
  if (column > 0 && words === "–") return null;
  const number = parseFloat(words);
  return column > 0 && !Number.isNaN(number) ? number : words;
};

const compare = (a, b) =>
  typeof a === "number" && typeof b === "number"
    ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true });

const sort = (header) => {
  const ascending = header.getAttribute("aria-sort") !== "ascending";
  for (const other of header.parentElement.cells) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const body = header.closest("table").tBodies[0];
  const rows = [...body.rows].map((row) => [value(row, header.cellIndex), row]);
  // Rows without a number stay below, in both directions.
  rows.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return ascending ? compare(a, b) : compare(b, a);
  });
  body.append(...rows.map(([, row]) => row));
};

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sort(button.parentElement));
}

const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);

document.addEventListener("pointerover", (event) => {
  const words = event.target.closest?.("[data-tip]")?.dataset.tip;
  tip.hidden = !words;
  if (!words) return;
  tip.textContent = words;
  const at = event.target.getBoundingClientRect();
  const left = Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const above = at.top - tip.offsetHeight - 8;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above > 0 ? above : at.bottom + 8}px`;
});
document.addEventListener("scroll", () => (tip.hidden = true), { passive: true });
