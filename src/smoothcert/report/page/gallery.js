// Images chosen by one run, each with its outcome under all runs of the same sigma and data set.
function voteBars(image) {
  if (!image.votes.length) return make("p", { class: "quiet" }, "votes not recorded");
  const bars = make("div", { class: "votes" });
  for (const [name, count, own] of image.votes) {
    const share = (100 * count) / image.n;
    const bar = make("i", own ? { class: "own" } : {});
    bar.style.setProperty("--share", `${share}%`);
    // Rounded down: 100 % is for votes that all agree.
    bars.append(make("span", { title: name }, name), bar, make("b", {}, `${(Math.floor(share * 10) / 10).toFixed(1)} %`));
  }
  return bars;
}

function picture(image) {
  const alt = `image ${image.index}, ${image.label}`;
  const shown = make("img", { src: data.gallery.pictures[image.picture], alt });
  // A few dozen pixels are shown as such; photographs are smoothed.
  shown.addEventListener("load", () => shown.classList.toggle("large", shown.naturalWidth > 48));
  return shown;
}

const said = (predict, right) => (predict === null ? "abstained" : `predicted ${predict} ${right ? "✓" : "✗"}`);

// One line per run: its name, what it predicts if that is wrong, and a bar as long as its certified radius.
function outcomeLines(outcomes, chosen) {
  const longest = Math.max(...outcomes.map(([, , , radius]) => radius)) || 1;
  const lines = outcomes.map(([number, predict, right, radius]) => {
    const { name, label } = data.gallery.runs[number];
    const bar = make("i", { class: right ? looks.get(name) : `${looks.get(name)} off` });
    bar.style.setProperty("--share", `${(100 * radius) / longest}%`);
    const words = right ? radius.toFixed(3) : predict === null ? "abstains" : `${predict} ✗ ${radius.toFixed(3)}`;
    const title = `${name}: ${said(predict, right)}, radius ${radius.toFixed(3)}`;
    return make("li", { title, ...(number === chosen ? { class: "chosen" } : {}) }, make("span", {}, label), bar, make("b", {}, words));
  });
  return make("ul", { class: "outcomes" }, ...lines);
}

function card(image, run, number) {
  const outcomes = data.gallery.groups[run.group][image.index];
  const [, predict, right, radius] = outcomes.find(([other]) => other === number);
  const text = make(
    "div",
    {},
    make("p", { class: "radius" }, make("small", {}, "radius "), radius.toFixed(3)),
    make("p", { title: image.label }, `true ${image.label}`),
    make("p", { class: right ? "right" : "off", title: said(predict, right) }, said(predict, right)),
    voteBars(image),
    ...(image.n ? [make("p", { class: "quiet" }, `n = ${image.n.toLocaleString("en")}`)] : []),
  );
  const index = make("figcaption", { class: "quiet" }, `image ${image.index}`);
  const figure = make("figure", {}, ...(image.picture === null ? [] : [picture(image)]), index);
  return make("li", { class: "card" }, figure, text, ...(outcomes.length > 1 ? [outcomeLines(outcomes, number)] : []));
}

const KINDS = {
  "runs differ": ["of the images that all runs have", "the largest difference of radius first"],
  "smallest radius": ["images classified correctly", "the smallest radius first"],
  "largest radius": ["images classified correctly", "the largest radius first"],
  wrong: ["wrong images", "the largest radius first"],
  abstained: ["abstained images", "in the order of the file"],
};

function startGallery(section) {
  const [select, kinds, reason, count, cards] = ["select", ".kinds", ".reason", ".count", ".cards"].map((part) =>
    section.querySelector(part),
  );
  data.gallery.runs.forEach((run, i) => select.append(make("option", { value: i }, run.name)));
  let chosen = 0;

  function show() {
    const number = Number(select.value);
    const run = data.gallery.runs[number];
    if (!run.kinds[chosen]?.total) chosen = Math.max(0, run.kinds.findIndex((kind) => kind.total));
    reason.hidden = run.note === null;
    reason.textContent = run.note ?? "";
    kinds.replaceChildren(
      ...run.kinds.map((kind, i) => {
        const button = make("button", { type: "button", "aria-pressed": i === chosen }, `${kind.title} `);
        if (kind.title === "wrong" || kind.title === "abstained") button.append(`(${kind.total})`);
        button.disabled = !kind.total;
        button.addEventListener("click", () => {
          chosen = i;
          show();
          kinds.children[i].focus();
        });
        return button;
      }),
    );
    const kind = run.kinds[chosen];
    const [what, order] = KINDS[kind.title];
    const total = kind.title === "runs differ" ? "" : `of ${kind.total.toLocaleString("en")} `;
    count.textContent = `${kind.images.length} ${total}${what}, ${order}.`;
    cards.replaceChildren(...kind.images.map((image) => card(image, run, number)));
  }

  select.addEventListener("change", show);
  show();
}

startGallery(document.getElementById("gallery"));
