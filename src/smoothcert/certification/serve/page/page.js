"use strict";
// Draws, sends one image, and shows the events of the answer. Texts from the server are set as text, never as HTML.
const $ = (id) => document.getElementById(id);
const pad = $("pad"), pen = pad.getContext("2d", { willReadFrequently: true });
const COPIES = 8, INK = 20, ANIMATION = 3000; // milliseconds for all looks of an answer
let models = [], token = "", lastImage = null, running = null, timer = 0, drawn = false;

const headers = () => (token ? { Authorization: `Bearer ${token}` } : {});
const model = () => models[Number($("slider").value)] || models[0];
const named = (cls) => model().classes[cls];
const down = (value, digits) => (Math.floor(value * 10 ** digits) / 10 ** digits).toFixed(digits); // never rounds up

function show(text) {
  $("message").textContent = text;
  $("message").hidden = !text;
}

function wrong(text) {
  show(text);
  $("class").textContent = "–";
  $("claim").textContent = "No answer.";
  $("details").hidden = true;
  $("message").scrollIntoView({ block: "nearest" });
}

async function problem(response) {
  if (response.status === 401) $("login").hidden = false;
  try {
    return (await response.json()).error;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

async function start() {
  const response = await fetch("v1/model", { headers: headers() });
  if (!response.ok) return show(await problem(response));
  show("");
  $("login").hidden = true;
  const about = await response.json();
  models = about.models.sort((a, b) => a.sigma - b.sigma);
  const choices = [1000, 2000, 5000, 10000, 20000, 50000, 100000].filter((n) => n <= about.limits.votes);
  $("budget").replaceChildren(...choices.map((n) => new Option(n.toLocaleString("en"), n, n === 10000, n === 10000)));
  $("slider").max = models.length - 1;
  $("slider").value = Math.floor((models.length - 1) / 2);
  $("sigmas").hidden = models.length < 2;
  chosen();
}

function chosen() {
  const now = model(), [channels, height, width] = now.shape;
  $("sigma").textContent = now.sigma;
  $("model").textContent = `${now.name}: ${now.noise} noise, sigma ${now.sigma}, ${width}x${height} pixels, ` +
    `model ${now.weights_sha256.slice(0, 12)}`;
  $("hint").textContent = channels === 1 ? "Draw a digit with mouse or finger" : "Drop an image here";
}

// Drawing: white on black.
function clear() {
  clearTimeout(timer); // what was drawn last may not be sent yet
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, pad.width, pad.height);
  drawn = false;
  $("hint").hidden = false;
}

function position(event) {
  const box = pad.getBoundingClientRect();
  return [((event.clientX - box.left) * pad.width) / box.width, ((event.clientY - box.top) * pad.height) / box.height];
}

pad.addEventListener("pointerdown", (event) => {
  if (!models.length || model().shape[0] !== 1) return;
  clearTimeout(timer);
  if (!drawn) clear();
  drawn = true;
  $("hint").hidden = true;
  pad.setPointerCapture(event.pointerId);
  pen.strokeStyle = "#fff";
  pen.lineWidth = INK;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(...position(event));
  pen.lineTo(...position(event));
  pen.stroke();
});
pad.addEventListener("pointermove", (event) => {
  if (!pad.hasPointerCapture(event.pointerId)) return;
  pen.lineTo(...position(event));
  pen.stroke();
});
pad.addEventListener("pointerup", () => {
  clearTimeout(timer);
  if (drawn) timer = setTimeout(() => send({ body: digit(), type: "application/octet-stream", query: "dtype=uint8" }), 700);
});

// As the digits of MNIST: scaled into 20/28 of the image, with the centre of mass in the middle.
function digit() {
  const [, height, width] = model().shape, side = pad.width;
  const ink = pen.getImageData(0, 0, side, side).data;
  let [left, top, right, bottom, mass, x0, y0] = [side, side, 0, 0, 0, 0, 0];
  for (let y = 0; y < side; y++) for (let x = 0; x < side; x++) {
    const value = ink[4 * (y * side + x)];
    if (!value) continue;
    [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x + 1), Math.min(top, y), Math.max(bottom, y + 1)];
    [mass, x0, y0] = [mass + value, x0 + value * (x + 0.5), y0 + value * (y + 0.5)];
  }
  const small = document.createElement("canvas"), brush = small.getContext("2d");
  [small.width, small.height] = [width, height];
  const scale = (20 / 28) * Math.min(width, height) / Math.max(right - left, bottom - top, 1);
  brush.imageSmoothingQuality = "high";
  brush.fillRect(0, 0, width, height);
  brush.setTransform(scale, 0, 0, scale, width / 2 - (scale * x0) / mass, height / 2 - (scale * y0) / mass);
  brush.drawImage(pad, 0, 0);
  const grey = brush.getImageData(0, 0, width, height).data;
  return Uint8Array.from({ length: width * height }, (_, k) => grey[4 * k]);
}

function open(file) {
  if (!file || !models.length) return;
  clear();
  const shown = new Image();
  shown.onload = () => {
    const scale = Math.min(pad.width / shown.width, pad.height / shown.height);
    pen.drawImage(shown, (pad.width - scale * shown.width) / 2, (pad.height - scale * shown.height) / 2,
      scale * shown.width, scale * shown.height);
    $("hint").hidden = true;
    URL.revokeObjectURL(shown.src);
  };
  shown.src = URL.createObjectURL(file);
  send({ body: file, type: file.type || "image/png", query: "resize=true" });
}

// One request: the previous one is left, which ends it on the server at its next look.
async function send(image) {
  lastImage = image;
  $("again").disabled = false;
  if (running) running.abort();
  const mine = (running = new AbortController());
  show("");
  $("class").textContent = "…";
  $("claim").textContent = "Voting.";
  $("details").hidden = false;
  $("change").hidden = true;
  $("notes").textContent = "";
  try {
    const query = `v1/predict?copies=${COPIES}&votes=${$("budget").value}&model=${encodeURIComponent(model().name)}&${image.query}`;
    const response = await fetch(query, {
      method: "POST", body: image.body, signal: mine.signal,
      headers: { ...headers(), "Content-Type": image.type, Accept: "text/event-stream" },
    });
    if (!response.ok) return wrong(await problem(response));
    await follow(response.body.getReader(), mine.signal);
  } catch (error) {
    if (error.name !== "AbortError") wrong("The server does not answer; is it still running?");
  }
}

async function follow(reader, signal) {
  const text = new TextDecoder();
  let rest = "", pause = 0, ended = false;
  for (;;) {
    const { done, value } = await reader.read();
    rest += done ? "" : text.decode(value, { stream: true });
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (signal.aborted) return; // looks that have arrived are shown slowly, and another image may follow meanwhile
      const [kind, data] = block.split("\n").map((line) => line.slice(line.indexOf(": ") + 2));
      const content = JSON.parse(data);
      if (kind === "start") {
        $("original").src = content.picture;
        pause = Math.min(250, ANIMATION / content.rule.looks);
        $("scale").textContent = `in ${content.norm}, for pixels from 0 (black) to 1 (white); ` +
          `wrong with probability at most ${content.rule.alpha}`;
      } else if (kind === "look") {
        look(content);
        if (!matchMedia("(prefers-reduced-motion: reduce)").matches) await new Promise((go) => setTimeout(go, pause));
      } else if (kind === "answer") answer(content);
      else wrong(content.error);
      ended = ended || kind === "answer" || kind === "error";
    }
    if (done) break;
  }
  if (!ended) wrong("The connection ended before the answer; try again.");
}

function element(kind, name, text) {
  const made = document.createElement(kind);
  made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function look(content) {
  const total = content.n, votes = content.votes;
  $("count").textContent = total.toLocaleString("en");
  let classes = model().classes.map((_, k) => k);
  if (classes.length > 12) classes = Object.keys(votes).map(Number).sort((a, b) => votes[b] - votes[a]).slice(0, 10);
  $("bars").replaceChildren(...classes.map((cls) => {
    const share = total ? (votes[cls] || 0) / total : 0, leads = cls === content.leading_class;
    const bar = element("div", leads ? "bar leads" : "bar"), track = element("div", "track"), fill = element("div", "fill");
    fill.style.width = `${100 * share}%`;
    track.append(fill);
    if (leads && content.lower_bound > 0) {
      const bound = element("div", "bound");
      bound.style.left = `calc(${100 * content.lower_bound}% - 3px)`;
      track.append(bound);
    }
    bar.append(element("span", "name", named(cls)), track, element("span", "share", `${(100 * share).toFixed(1)}%`));
    return bar;
  }));
  gauge(content.radius);
  if (!content.copies) return;
  $("copies").replaceChildren(...content.copies.classes.map((cls, k) => {
    const copy = element("div", cls === content.leading_class ? "copy" : "copy differs"), picture = element("div", "");
    picture.style.backgroundImage = `url(${content.copies.picture})`;
    picture.style.backgroundSize = `${100 * content.copies.classes.length}% 100%`;
    picture.style.backgroundPosition = `${(100 * k) / Math.max(1, content.copies.classes.length - 1)}% 0`;
    copy.append(picture, named(cls));
    return copy;
  }));
}

function gauge(radius) {
  $("radius").textContent = down(radius, 2);
  $("gauge").firstElementChild.style.width = `${Math.min(100, (25 * radius) / model().sigma)}%`; // 4 sigmas are full
}

function answer(content) {
  $("result").scrollIntoView({ block: "nearest" }); // on a phone it is below the drawing
  gauge(content.radius);
  $("notes").textContent = content.notes.join("; ");
  if (content.abstained) {
    $("class").textContent = "I do not know";
    $("claim").textContent = `Abstention: ${content.votes_used.toLocaleString("en")} votes do not prove that one class ` +
      "wins, so the server does not guess.";
    return;
  }
  $("class").textContent = content.name;
  $("claim").textContent = `Every image closer than ${down(content.radius, 2)} gets this class, proved by ` +
    `${content.votes_used.toLocaleString("en")} votes in ${Math.round(content.milliseconds)} ms.`;
  const change = content.change;
  $("change").hidden = !change;
  if (!change) return;
  $("changed").src = change.picture;
  $("distance").textContent = change.distance.toFixed(2);
  const still = change.class === content.class ? "still " : "";
  $("verdict").textContent = `The changed image ${still}gets ${change.votes} of ${change.of} votes for ${named(change.class)}. ` +
    "Stronger changes are not covered.";
}

$("clear").addEventListener("click", clear);
$("again").addEventListener("click", () => lastImage && send(lastImage));
$("slider").addEventListener("input", chosen);
$("slider").addEventListener("change", () => lastImage && send(lastImage));
$("budget").addEventListener("change", () => lastImage && send(lastImage));
$("file").addEventListener("change", (event) => { open(event.target.files[0]); event.target.value = ""; });
$("login").addEventListener("submit", (event) => { event.preventDefault(); token = $("token").value.trim(); start(); });
for (const kind of ["dragover", "dragleave", "drop"]) document.addEventListener(kind, (event) => {
  event.preventDefault();
  $("drop").classList.toggle("over", kind === "dragover");
  if (kind === "drop") open(event.dataTransfer.files[0]);
});
clear();
start().catch(() => show("The server does not answer; is it still running?"));
