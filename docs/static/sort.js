// Tables inside an element of class "sortable": a click on a column's head sorts by it, a second click reverses.
"use strict";

function sortKey(cell) {
  const text = cell.textContent.trim();
  const number = Number(text.replace(/,/g, ""));
  return text !== "" && Number.isFinite(number) ? number : text === "-" ? null : text.toLowerCase();
}

function compareKeys(a, b, sign) {
  // Cells without a figure come last in both directions.
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
}

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".sortable table")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].map((row) => [sortKey(row.cells[column]), row]);
        rows.sort((a, b) => compareKeys(a[0], b[0], down ? 1 : -1));
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    });
  }
});
