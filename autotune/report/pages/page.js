// Sorts a table by the column whose head is pressed: numbers by value, words by letters.
for (const head of document.querySelectorAll("th")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const text = row => row.cells[head.cellIndex].textContent;
    const number = row => parseFloat(text(row).replace(/,/g, ""));
    const order = (a, b) => number(a) - number(b) || text(a).localeCompare(text(b));
    const body = head.closest("table").tBodies[0];
    body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * order(a, b)));
  });
}
// Above a long table: a field that leaves only the rows with all of its words.
for (const table of document.querySelectorAll("table")) {
  if (table.tBodies[0].rows.length < 20) continue;
  const label = document.createElement("label");
  const field = document.createElement("input");
  label.append("Only rows with ", field);
  table.parentNode.before(label);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of table.tBodies[0].rows)
      row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  });
}
