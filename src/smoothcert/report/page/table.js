// A click on a heading sorts by that column, a second one the other way round, a third restores the order of the file.
function sortable(table) {
  const headings = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const body = table.tBodies[0];
  // A run with the rows aside under it moves as one.
  const original = [];
  for (const row of body.rows) {
    if (row.classList.contains("aside") && original.length) original.at(-1).push(row);
    else original.push([row]);
  }

  function compare(column, numeric, direction) {
    return ([one], [other]) => {
      const [a, b] = [one.cells[column].dataset.value, other.cells[column].dataset.value];
      // What is not known comes last in either direction.
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      return direction * (numeric ? parseFloat(a) - parseFloat(b) : a.localeCompare(b, undefined, { numeric: true }));
    };
  }

  headings.forEach((heading, column) => {
    const numeric = heading.classList.contains("number");
    const order = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
    heading.querySelector("button").addEventListener("click", () => {
      const next = order[order.indexOf(heading.getAttribute("aria-sort")) + 1];
      for (const each of headings) each.removeAttribute("aria-sort");
      table.classList.toggle("sorted", next !== undefined);
      if (next === undefined) return body.append(...original.flat());
      heading.setAttribute("aria-sort", next);
      const direction = next === "ascending" ? 1 : -1;
      body.append(...[...original].sort(compare(column, numeric, direction)).flat());
    });
  });
}

document.querySelectorAll(".results").forEach(sortable);
