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
    const order = (a, b) => parseFloat(text(a).replace(/,/g, "")) - parseFloat(text(b).replace(/,/g, "")) || text(a).localeCompare(text(b));
    const body = head.closest("table").tBodies[0];
    body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * order(a, b)));
  });
}
