// Certified accuracy against radius: one panel per sigma, one step curve per run with every step of the data.
const MARGIN = { left: 36, right: 16, top: 24, bottom: 40 };
const hidden = new Set(); // labels

// The share of images certified with a radius of at least `radius`, in percent.
function accuracy(run, radius) {
  let [low, high] = [0, run.radii.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.radii[middle] >= radius) high = middle;
    else low = middle + 1;
  }
  return 100 * ((run.radii.length - low) / run.images);
}

// Rounded as in the tables: of two decimals that are equally near, the even one, where toFixed takes the larger.
const percentText = (percent) => `${(percent % 1 === 0.25 ? percent - 0.01 : percent).toFixed(1)} %`;

function tickStep(reach, most) {
  const steps = [1, 2, 2.5, 5].flatMap((digit) => [-3, -2, -1, 0, 1, 2].map((power) => digit * 10 ** power));
  return steps.sort((a, b) => a - b).find((step) => reach / step <= most) ?? reach;
}

// Pixels of radii and percentages in a plot `width` pixels wide.
function scales(panel, width) {
  const height = Math.round(Math.min(360, Math.max(290, 0.66 * width)));
  const ends = [...panel.runs.map((run) => run.radii.at(-1) ?? 0), ...panel.ceilings.map(([radius]) => radius)];
  // Room on the right for the words at the last ceiling.
  const reach = (Math.max(...ends) || 1) * (1 + 22 / width + 0.02);
  const [across, down] = [width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom];
  const x = (radius) => MARGIN.left + (across * radius) / reach;
  const y = (percent) => MARGIN.top + down * (1 - percent / 100);
  const radiusAt = (pixel) => Math.min(reach, Math.max(0, (reach * (pixel - MARGIN.left)) / across));
  return { width, height, reach, across, x, y, radiusAt };
}

function axes({ norm }, { height, reach, across, x, y }) {
  const parts = [];
  for (const percent of [0, 20, 40, 60, 80, 100]) {
    parts.push(drawn("line", { class: percent ? "grid" : "axis", x1: x(0), x2: x(reach), y1: y(percent), y2: y(percent) }));
    parts.push(drawn("text", { x: x(0) - 7, y: y(percent) + 4, "text-anchor": "end" }, String(percent)));
  }
  const step = tickStep(reach, across / 55);
  const decimals = Math.max(0, Math.min(3, Math.ceil(-Math.log10(step)) + (String(step).includes("25") ? 1 : 0)));
  for (let tick = 0; tick * step <= reach; tick++) {
    const at = x(tick * step);
    if (tick) parts.push(drawn("line", { class: "grid", x1: at, x2: at, y1: y(0), y2: y(100) }));
    parts.push(drawn("text", { x: at, y: y(0) + 17, "text-anchor": "middle" }, (tick * step).toFixed(decimals)));
  }
  parts.push(drawn("text", { x: x(reach / 2), y: height - 6, "text-anchor": "middle" }, `${norm} radius`));
  parts.push(drawn("text", { x: 0, y: 11 }, "certified accuracy (%)"));
  return parts;
}

function ceilingMarks(panel, { x, y }) {
  return panel.ceilings.flatMap(([radius, n]) => {
    const at = x(radius);
    const text = `limit of n = ${n.toLocaleString("en")}`;
    return [
      drawn("line", { class: "ceiling", x1: at, x2: at, y1: y(0), y2: y(100) }),
      drawn("text", { transform: `translate(${at + 13} ${y(50)}) rotate(-90)`, "text-anchor": "middle" }, text),
    ];
  });
}

// Steps within the same quarter of a pixel are drawn as one.
function stepPath(run, { x, y }) {
  const right = run.radii.length;
  const height = (left) => y((100 * left) / run.images).toFixed(2);
  const quarters = run.radii.map((radius) => Math.round(4 * x(radius)));
  const steps = quarters.map((at, i) => (at === quarters[i + 1] ? "" : `H${at / 4}V${height(right - 1 - i)}`));
  return `M${x(0)} ${height(right)}${steps.join("")}`;
}

// One name in the legend, with the ACR of its run in each panel.
function chip(label, redraw) {
  const runs = data.panels.map((panel) => panel.runs.find((run) => run.label === label));
  const run = runs.find(Boolean);
  const sample = drawn("line", { x1: 0, x2: 26, y1: 5, y2: 5, "stroke-dasharray": run.dash });
  const line = drawn("svg", { width: 26, height: 10, class: lookOf(run), "aria-hidden": "true" }, sample);
  const title = runs.flatMap((each) => each?.name ?? []).join(", ");
  const button = make("button", { type: "button", class: "chip", "aria-pressed": "true", title }, line, make("span", {}, label));
  button.append(make("small", {}, `ACR ${runs.map((each) => each?.acr ?? "–").join(" · ")}`));
  button.addEventListener("click", () => {
    if (!hidden.delete(label)) hidden.add(label);
    button.setAttribute("aria-pressed", String(!hidden.has(label)));
    redraw();
  });
  return button;
}

// The radius as it is shown, and the runs at this radius in the order in which a vertical line meets their curves.
function readoutLines(runs, radius) {
  const values = runs.map((run) => [run, accuracy(run, Number(radius))]).sort(([, a], [, b]) => b - a);
  const lines = values.map(([run, percent]) => {
    const name = make("span", {}, make("span", { class: `swatch ${lookOf(run)}` }), run.label);
    return make("p", {}, name, make("b", {}, percentText(percent)));
  });
  return [make("p", {}, `radius ${radius}`), ...lines];
}

function drawPanel(panel) {
  const svg = drawn("svg", { tabindex: 0, role: "slider", "aria-valuemin": 0 });
  const readout = make("div", { class: "readout", hidden: "" });
  const plot = make("div", { class: "plot" }, svg, readout);
  const shown = () => panel.runs.filter((run) => !hidden.has(run.label));
  let scale;
  let radius = null;

  function draw() {
    scale = scales(panel, plot.clientWidth || 480);
    filled(svg, { viewBox: `0 0 ${scale.width} ${scale.height}`, "aria-valuemax": scale.reach.toFixed(3) }, []);
    svg.replaceChildren(...axes(panel, scale), ...ceilingMarks(panel, scale));
    for (const run of shown()) {
      const look = { class: `curve ${lookOf(run)}`, "stroke-dasharray": run.dash, d: stepPath(run, scale) };
      svg.append(drawn("path", look));
    }
    point(radius);
  }

  function point(at) {
    radius = at;
    for (const mark of svg.querySelectorAll(".cursor, .dot")) mark.remove();
    readout.hidden = at === null;
    if (at === null) return;
    const { x, y, width } = scale;
    svg.append(drawn("line", { class: "cursor", x1: x(at), x2: x(at), y1: y(0), y2: y(100) }));
    for (const run of shown()) {
      svg.append(drawn("circle", { class: `dot ${lookOf(run)}`, cx: x(at), cy: y(accuracy(run, at)), r: 4 }));
    }
    const text = at.toFixed(3);
    readout.replaceChildren(...readoutLines(shown(), text));
    const near = `${(100 * (x(at) + 12)) / width}%`;
    const far = `${100 - (100 * (x(at) - 12)) / width}%`;
    const onTheRight = x(at) < width / 2;
    readout.style.left = onTheRight ? near : "auto";
    readout.style.right = onTheRight ? "auto" : far;
    const values = shown().map((run) => `${run.label} ${percentText(accuracy(run, Number(text)))}`);
    filled(svg, { "aria-valuenow": text, "aria-valuetext": `radius ${text}: ${values.join(", ")}` }, []);
  }

  svg.setAttribute("aria-label", `Certified accuracy at a radius, ${panel.title}`);
  svg.setAttribute("aria-valuenow", 0);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    point(scale.radiusAt(((event.clientX - box.left) * scale.width) / box.width));
  });
  svg.addEventListener("pointerleave", () => point(null));
  svg.addEventListener("blur", () => point(null));
  svg.addEventListener("keydown", (event) => {
    const step = scale.reach / 100;
    const from = radius ?? 0;
    const moves = { ArrowLeft: from - step, ArrowRight: from + step, Home: 0, End: scale.reach, Escape: null };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const to = moves[event.key];
    point(to === null ? null : Math.min(scale.reach, Math.max(0, to)));
  });

  document.querySelector(".panels").append(make("figure", { class: "panel" }, make("h3", {}, panel.title), plot));
  // In the next frame: a change inside the observer is reported as an error.
  const fit = () => plot.clientWidth !== scale.width && draw();
  new ResizeObserver(() => requestAnimationFrame(fit)).observe(plot);
  draw();
  return draw;
}

for (const run of data.panels.flatMap((panel) => panel.runs)) {
  let sum = 0;
  run.radii = run.steps.map((step) => (sum += step) / STEPS_PER_UNIT);
}
const draws = data.panels.map(drawPanel);
// A label looks the same in all panels, so one legend serves them all.
const labels = new Set(data.panels.flatMap((panel) => panel.runs.map((run) => run.label)));
const chips = [...labels].map((label) => chip(label, () => draws.forEach((draw) => draw())));
document.querySelector(".chips").append(...chips);
