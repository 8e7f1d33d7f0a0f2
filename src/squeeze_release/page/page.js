"use strict";

// Headings become buttons; a click sorts by that column, a second one the other way round.
function sortable(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows].sort((a, b) => compare(a.cells[column], b.cells[column]));
      body.append(...(up ? rows : rows.reverse()));
    });
  });
}

function compare(a, b) {
  const one = a.dataset.value, other = b.dataset.value;
  if (one !== undefined && other !== undefined) return Number(one) - Number(other);
  return a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
}

document.querySelectorAll("table.sortable").forEach(sortable);

// On paper nothing can be opened.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
