"use strict";
// The page works without this file; it adds sorting, the theme button, and the class buttons of the maps.
(() => {
  const root = document.documentElement;
  const themes = ["automatic", "light", "dark"];

  function stored() {
    try { return localStorage.getItem("usfan-theme"); } catch { return null; } // a browser may forbid it for files
  }

  function setTheme(name) {
    if (name === "automatic") delete root.dataset.theme; else root.dataset.theme = name;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${name}`;
    try { localStorage.setItem("usfan-theme", name); } catch { /* shown, not remembered */ }
  }

  const first = themes.includes(stored()) ? stored() : "automatic";
  if (first !== "automatic") root.dataset.theme = first; // before anything is painted

  function compare(a, b) {
    if (a === b) return 0;
    if (a === "") return 1; // empty cells stay at the end
    if (b === "") return -1;
    const [x, y] = [Number(a), Number(b)];
    if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
    return a.localeCompare(b, undefined, { numeric: true, sensitivity: "base" });
  }

  function sortBy(button) {
    const heading = button.closest("th");
    const body = heading.closest("table").tBodies[0];
    const column = heading.cellIndex;
    const rows = [...body.rows];
    const value = (row) => row.cells[column].dataset.value ?? "";
    // Figures are wanted largest first, names from A.
    const numeric = rows.some((row) => value(row) !== "" && !Number.isNaN(Number(value(row))));
    const now = heading.getAttribute("aria-sort");
    const next = now === "none" ? (numeric && column > 0 ? "descending" : "ascending")
      : now === "ascending" ? "descending" : "ascending";
    const sign = next === "ascending" ? 1 : -1;
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return x === "" || y === "" ? compare(x, y) : sign * compare(x, y);
    });
    body.append(...rows);
    for (const th of heading.parentNode.cells) th.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", next);
  }

  function bringOut(button) {
    const on = button.getAttribute("aria-pressed") !== "true";
    const section = button.closest("section");
    for (const other of section.querySelectorAll(".picker button")) other.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-pressed", String(on));
    for (const spots of section.querySelectorAll(".spots")) {
      spots.classList.toggle("faint", on && spots.dataset.class !== button.dataset.class);
    }
  }

  function unfold() { // a link may lead into a folded section
    const part = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const details = part?.closest("details") ?? part?.querySelector("details");
    if (details) details.open = true;
  }

  document.addEventListener("DOMContentLoaded", () => {
    setTheme(first);
    unfold();
    addEventListener("hashchange", unfold);
    addEventListener("beforeprint", () => {
      for (const details of document.querySelectorAll("details")) details.open = true;
    });
    document.getElementById("theme").addEventListener("click", () => {
      const now = root.dataset.theme ?? "automatic";
      setTheme(themes[(themes.indexOf(now) + 1) % themes.length]);
    });
    document.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button?.matches("table.sortable th button")) sortBy(button);
      if (button?.matches(".picker button")) bringOut(button);
    });
    root.dataset.ready = "1";
  });
})();
