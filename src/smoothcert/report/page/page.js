// What the parts of the page share: the data, and a way to make elements from text that is never read as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const STEPS_PER_UNIT = 10000;

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

const lookOf = (run) => `look-${run.look}`;
const looks = new Map(data.panels.flatMap((panel) => panel.runs.map((run) => [run.name, lookOf(run)])));

// Paper cannot be clicked: what is folded up is printed unfolded.
const unfolded = new Set();
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not([open])")) {
    details.open = true;
    unfolded.add(details);
  }
});
addEventListener("afterprint", () => {
  for (const details of unfolded) details.open = false;
  unfolded.clear();
});
