// Images of one run at a time: those of smallest or largest radius, wrong ones, or those without an answer.
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

function card(image) {
  const said = image.predict === null ? "abstained" : image.right ? `predicted ${image.predict} ✓` : `predicted ${image.predict} ✗`;
  const radius = make("p", { class: "radius" }, make("small", {}, "radius "), image.radius);
  const text = make(
    "div",
    {},
    radius,
    make("p", { title: image.label }, `true ${image.label}`),
    make("p", { class: image.right ? "right" : "off", title: said }, said),
    voteBars(image),
    ...(image.n ? [make("p", { class: "quiet" }, `n = ${image.n.toLocaleString("en")}`)] : []),
  );
  const index = make("figcaption", { class: "quiet" }, `image ${image.index}`);
  const figure = make("figure", {}, ...(image.picture === null ? [] : [picture(image)]), index);
  return make("li", { class: "card" }, figure, text);
}

function startGallery(section) {
  const [select, kinds, reason, count, cards] = ["select", ".kinds", ".reason", ".count", ".cards"].map((part) =>
    section.querySelector(part),
  );
  data.gallery.runs.forEach((run, i) => select.append(make("option", { value: i }, run.name)));
  let chosen = 0;

  function show() {
    const run = data.gallery.runs[select.value];
    if (!run.kinds[chosen].total) chosen = Math.max(0, run.kinds.findIndex((kind) => kind.total));
    reason.hidden = run.note === null;
    reason.textContent = run.note ?? "";
    kinds.replaceChildren(
      ...run.kinds.map((kind, i) => {
        const button = make("button", { type: "button", "aria-pressed": i === chosen }, `${kind.title} `);
        if (i > 1) button.append(`(${kind.total})`);
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
    const what = chosen < 2 ? "images classified correctly" : `${kind.title} images`;
    const order = ["the smallest radius first", "the largest radius first", "the largest radius first", "in the order of the file"][chosen];
    count.textContent = `${kind.images.length} of ${kind.total.toLocaleString("en")} ${what}, ${order}.`;
    cards.replaceChildren(...kind.images.map(card));
  }

  select.addEventListener("change", show);
  show();
}

startGallery(document.getElementById("gallery"));
