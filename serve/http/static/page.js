"use strict";

const PERIOD = 1000;  // milliseconds between two looks at the activity
const KEPT = 120;  // points of the history of requests per second
const SHOWN = 4000;  // characters of an answer
const SVG = document.getElementById("model").content.querySelector("svg").namespaceURI;

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = key ? { authorization: "Bearer " + key } : {};
  const answer = await fetch(path, { ...options, headers: { ...headers, ...options.headers } });
  if (answer.status === 401) document.getElementById("unlock").hidden = false;
  return answer;
}

function say(text) {
  const notice = document.getElementById("notice");
  notice.textContent = text;
  notice.className = "error";
  notice.hidden = !text;
}

function addTile(list, value, label) {
  const tile = make("div");
  tile.append(make("dt", label), make("dd", value));
  list.append(tile);
  return tile.lastChild;
}

// The card of a model

function showModel(model) {
  const card = document.getElementById("model").content.cloneNode(true).firstElementChild;
  card.querySelector("h2").textContent = model.name;
  const lead = card.querySelector(".lead");
  lead.textContent = `${model.task}, ${model.size}, run by ${model.engine} in batches of up to ${model.cap} rows. `;
  if (model.report) {
    lead.append(make("a", "Report", { href: "page/reports/" + encodeURIComponent(model.name), target: "_blank", rel: "noopener" }));
  }
  showVerdict(card, model.verdict);
  const rows = [...model.inputs.map(each => ["input", each]), ...model.outputs.map(each => ["output", each])];
  for (const [kind, tensor] of rows) {
    const row = make("tr");
    const shape = tensor.shape.map(size => size < 0 ? "any" : size).join(" × ");
    row.append(make("td", `${kind} ${tensor.name}`), make("td", tensor.datatype), make("td", shape));
    card.querySelector("tbody").append(row);
  }
  if (model.writes) addChat(card, model);
  if (model.form) addForm(card, model);
  else card.querySelector("form.try").hidden = true;
  document.getElementById("models").append(card);
  return { card, history: [], live: addActivity(card) };
}

function showVerdict(card, verdict) {
  const box = card.querySelector(".verdict");
  box.classList.add(verdict.state);
  const words = { passed: "Passed: as faithful as was required.", failed: "Failed: not as faithful as was required.",
    inconclusive: "Inconclusive: the test samples are too few to tell.", none: "No verdict:" };
  box.querySelector("strong").textContent = words[verdict.state];
  box.querySelector(".basis").textContent = verdict.basis;
  for (const note of verdict.notes) box.querySelector(".notes").append(make("li", note));
  for (const figure of verdict.figures) addTile(card.querySelector(".figures"), figure.value, figure.label);
}

function addActivity(card) {
  const list = card.querySelector(".live");
  return {
    requests: addTile(list, "–", "requests/s"), rows: addTile(list, "–", "rows/s"),
    latency: addTile(list, "–", "mean latency"), batch: addTile(list, "–", "mean batch"),
    waiting: addTile(list, "–", "waiting"), failed: addTile(list, "–", "failed"),
  };
}

// Activity: differences of counters

function showActivity(view, before, now, seconds) {
  const done = now.succeeded + now.failed - before.succeeded - before.failed;
  const batches = now.batches - before.batches, rows = now.rows - before.rows;
  const rate = done / seconds, live = view.live;
  live.requests.textContent = rate.toFixed(rate < 10 ? 1 : 0);
  live.rows.textContent = (rows / seconds).toFixed(rows / seconds < 10 ? 1 : 0);
  live.latency.textContent = done ? ((now.answered_ns - before.answered_ns) / done / 1e6).toFixed(1) + " ms" : "–";
  live.batch.textContent = batches ? (rows / batches).toFixed(1) : "–";
  live.waiting.textContent = now.waiting;
  live.failed.textContent = now.failed;
  view.history.push(rate);
  if (view.history.length > KEPT) view.history.shift();
  const top = Math.max(1, ...view.history);
  const points = view.history.map((value, index) => `${KEPT - view.history.length + index},${23 - 22 * value / top}`);
  view.card.querySelector("polyline").setAttribute("points", points.join(" "));
}

async function watch(views) {
  let before = null, then = 0;
  for (;;) {
    if (!document.hidden) {
      try {
        const answer = await ask("page/activity");
        const now = await answer.json(), time = performance.now();
        if (answer.ok) {
          say("");
          if (Object.keys(now).sort().join("\n") !== [...views.keys()].sort().join("\n")) return;
          for (const [name, view] of views) {
            if (before) showActivity(view, before[name], now[name], (time - then) / 1000);
          }
          [before, then] = [now, time];
        }
      } catch { say("The server does not answer."); }
    }
    await new Promise(resolve => setTimeout(resolve, PERIOD));
  }
}

// The form: a text, texts by name, a file, or arrays in JSON

function addForm(card, model) {
  const form = card.querySelector("form.try"), fields = card.querySelector(".fields"), { field, accept, example } = model.form;
  const read = accept ? addFile(fields, model) : addSample(fields, field, example, model.name);
  form.addEventListener("submit", async event => {
    event.preventDefault();
    const box = card.querySelector(".answer"), time = form.querySelector(".time"), button = form.querySelector("button");
    let body;
    try { body = read(); } catch (error) { return showError(box, "This is no JSON: " + error.message); }
    if (!body) return showError(box, "Choose a file first.");
    button.disabled = true;
    const started = performance.now();
    try {
      const path = `v1/models/${encodeURIComponent(model.name)}/predict`;
      const answer = await ask(path, { method: "POST", ...body });
      const content = await answer.json();
      time.textContent = `${(performance.now() - started).toFixed(1)} ms`;
      if (answer.ok) showAnswer(box, content.answers[0], body.sample);
      else showError(box, String(content.error?.message ?? content.error ?? answer.status));
    } catch (error) { showError(box, String(error)); }
    button.disabled = false;
  });
}

function isTexts(example) {
  const values = example && typeof example === "object" && !Array.isArray(example) ? Object.values(example) : [];
  return values.length > 0 && values.every(value => typeof value === "string");
}

function addSample(fields, field, example, name) {
  const add = (label, value, id, code) => {
    const area = make("textarea", value, { id, spellcheck: "false", required: "" });
    if (code) area.classList.add("code");
    fields.append(make("label", label, { for: id }), area);
    return area;
  };
  const send = sample => ({ sample, body: JSON.stringify({ [field]: sample }), headers: { "content-type": "application/json" } });
  if (typeof example === "string") {
    const area = add("Text", example, "try-" + name);
    return () => send(area.value);
  }
  if (isTexts(example)) {
    const areas = Object.entries(example).map(([key, value]) => [key, add(key, value, `try-${name}-${key}`)]);
    return () => send(Object.fromEntries(areas.map(([key, area]) => [key, area.value])));
  }
  const area = add("Sample, in JSON", example === null ? "" : JSON.stringify(example), "try-" + name, true);
  return () => send(JSON.parse(area.value));
}

function addFile(fields, model) {
  const { field, accept } = model.form, id = "try-" + model.name;
  const drop = make("div"), input = make("input", undefined, { type: "file", id, accept });
  drop.className = "drop";
  fields.append(make("label", "Drop a file here, or choose one", { for: id }), drop);
  drop.append(input);
  let file = null, picture = null;
  const take = chosen => {
    file = chosen;
    picture?.remove();
    const kind = file?.type.split("/")[0];
    if (kind === "image") picture = make("img", undefined, { alt: file.name, src: URL.createObjectURL(file) });
    else if (kind === "audio") picture = make("audio", undefined, { controls: "", src: URL.createObjectURL(file), "aria-label": file.name });
    else return;
    drop.prepend(picture);
  };
  input.addEventListener("change", () => take(input.files[0] ?? null));
  for (const name of ["dragover", "dragleave", "drop"]) {
    drop.addEventListener(name, event => {
      event.preventDefault();
      drop.classList.toggle("over", name === "dragover");
      if (name === "drop") take(event.dataTransfer.files[0] ?? null);
    });
  }
  const test = { image: ["Use a test picture", drawPicture], audio: ["Use a test sound", makeSound] }[accept.split("/")[0]];
  if (test) {
    const example = make("button", test[0], { type: "button" });
    example.className = "second";
    example.addEventListener("click", async () => take(await test[1]()));
    drop.append(example);
  }
  return () => {
    if (!file) return null;
    const body = new FormData();
    body.append(field, file);
    return { sample: file, body };
  };
}

function drawPicture() {
  const canvas = make("canvas", undefined, { width: 256, height: 256 }), pen = canvas.getContext("2d");
  const sky = pen.createLinearGradient(0, 0, 0, 256);
  sky.addColorStop(0, "#4a90d9");
  sky.addColorStop(1, "#f2d7a0");
  pen.fillStyle = sky;
  pen.fillRect(0, 0, 256, 256);
  pen.fillStyle = "#e8622c";
  pen.arc(160, 110, 48, 0, 7);
  pen.fill();
  pen.fillStyle = "#2f5d3a";
  pen.fillRect(0, 190, 256, 66);
  return new Promise(resolve => canvas.toBlob(blob => resolve(new File([blob], "test.png", { type: "image/png" }))));
}

function makeSound() {  // a second of a rising tone: WAV, 16 bits, one channel, 16 kHz
  const rate = 16000, view = new DataView(new ArrayBuffer(44 + 2 * rate));
  const words = [[0, 0x46464952], [4, 36 + 2 * rate], [8, 0x45564157], [12, 0x20746d66], [16, 16], [20, 0x10001], [24, rate], [28, 2 * rate], [32, 0x100002], [36, 0x61746164], [40, 2 * rate]];
  for (const [place, word] of words) view.setUint32(place, word, true);
  for (let at = 0; at < rate; at++) view.setInt16(44 + 2 * at, 9000 * Math.sin(6.283 * (200 + 200 * at / rate) * at / rate), true);
  return new File([view], "test.wav", { type: "audio/wav" });
}

// Answers, shown by their form

function showError(box, text) {
  const line = make("p", text);
  line.className = "error";
  box.replaceChildren(line);
  box.hidden = false;
}

function isVector(value) {
  return Array.isArray(value) && value.length > 8 && value.every(each => typeof each === "number");
}

function showAnswer(box, answer, sample) {
  const parts = [];
  const spans = findSpans(answer), scores = findScores(answer), boxes = Array.isArray(answer?.objects) && answer.objects;
  if (spans && typeof sample === "string") parts.push(showSpans(spans, sample));
  else if (typeof answer?.mask === "string") parts.push(...showMask(answer));
  else if (boxes && sample instanceof Blob) parts.push(...showBoxes(boxes, sample));
  else if (scores) parts.push(...scores.map(showScore));
  else if (typeof answer?.text === "string") parts.push(make("p", answer.text || "An empty text."));
  else {
    for (const [name, value] of Object.entries(Object(answer))) if (isVector(value)) parts.push(...showVector(name, value));
  }
  const text = JSON.stringify(answer, null, parts.length ? 0 : 2);
  const raw = make("pre", text.length > SHOWN ? text.slice(0, SHOWN) + " …" : text);
  if (!parts.length) parts.push(raw);
  else {
    const details = make("details");
    details.append(make("summary", "JSON"), raw);
    parts.push(details);
  }
  box.replaceChildren(...parts);
  box.hidden = false;
}

function findList(answer, fits) {
  const lists = [answer, ...Object.values(Object(answer))].filter(Array.isArray);
  return lists.find(list => list.length && list.every(each => each && typeof each === "object" && fits(each)));
}

function findSpans(answer) {
  return findList(answer, each => Number.isInteger(each.start) && Number.isInteger(each.end));
}

function findScores(answer) {
  return findList(answer, each => typeof each.score === "number" && Object.values(each).some(value => typeof value === "string"));
}

function showScore(each) {
  const row = make("div"), name = Object.values(each).find(value => typeof value === "string");
  row.className = "bar";
  const meter = make("meter", undefined, { min: 0, max: 1, value: each.score, "aria-label": name });
  row.append(make("span", name), meter, make("output", each.score.toFixed(3)));
  return row;
}

function showMask(answer) {
  const canvas = make("canvas"), file = new Image();
  file.onload = () => {
    canvas.width = file.width; canvas.height = file.height;
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(file, 0, 0);
    const picture = context.getImageData(0, 0, file.width, file.height), colours = new Map();
    for (const { class: number } of answer.segments) colours.set(number, toColour(number));
    for (let at = 0; at < picture.data.length; at += 4) picture.data.set(colours.get(picture.data[at]) ?? [0, 0, 0], at);
    context.putImageData(picture, 0, 0);
  };
  file.src = "data:image/png;base64," + answer.mask;
  canvas.className = "mask";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "The class of each pixel: " + answer.segments.map(each => each.label).join(", "));
  const mark = each => markRow(showScore({ label: each.label, score: each.share }), `rgb(${toColour(each.class)})`);
  return [canvas, ...answer.segments.map(mark)];
}

function showBoxes(objects, file) {
  if (!objects.length) return [make("p", "Nothing was found.")];
  const canvas = make("canvas"), picture = new Image(), names = [...new Set(objects.map(each => each.label))];
  const paint = each => `rgb(${toColour(names.indexOf(each.label))})`;
  picture.onload = () => {
    canvas.width = picture.width; canvas.height = picture.height;
    const pen = canvas.getContext("2d"), line = Math.max(1, Math.round(Math.max(canvas.width, canvas.height) / 250));
    pen.drawImage(picture, 0, 0);
    URL.revokeObjectURL(picture.src);
    pen.lineWidth = line;
    pen.font = `${6 * line}px sans-serif`;
    for (const each of [...objects].reverse()) {  // those with the highest scores on top
      const { xmin, ymin, xmax, ymax } = each.box, top = Math.max(ymin, 7 * line);
      pen.strokeStyle = pen.fillStyle = paint(each);
      pen.strokeRect(xmin, ymin, xmax - xmin, ymax - ymin);
      pen.fillRect(xmin, top - 7 * line, pen.measureText(each.label).width + 2 * line, 7 * line);
      pen.fillStyle = "white";
      pen.fillText(each.label, xmin + line, top - 1.5 * line);
    }
  };
  picture.src = URL.createObjectURL(file);
  canvas.className = "boxes";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "What was found: " + objects.map(each => each.label).join(", "));
  const rows = objects.map(each => markRow(showScore({ label: each.label, score: each.score }), paint(each)));
  return [canvas, ...rows];
}

function markRow(row, colour) {
  row.firstChild.style.borderInlineStart = `.8em solid ${colour}`;
  row.firstChild.style.paddingInlineStart = ".4em";
  return row;
}

function toColour(number) {  // neighbouring numbers get colours that differ, and a number always the same one
  const turn = number * .618034 % 1 * 6, part = Math.round(200 * (1 - Math.abs(turn % 2 - 1)));
  const [red, green, blue] = [[200, part, 0], [part, 200, 0], [0, 200, part], [0, part, 200], [part, 0, 200], [200, 0, part]][Math.floor(turn)];
  return [red + 40, green + 40, blue + 40];
}

function showSpans(spans, text) {
  const line = make("p"), characters = Array.from(text);  // positions count characters, not UTF-16 units
  let end = 0;
  for (const span of [...spans].sort((a, b) => a.start - b.start)) {
    if (span.start < end) continue;
    line.append(characters.slice(end, span.start).join(""));
    const mark = make("mark", characters.slice(span.start, span.end).join(""));
    mark.append(make("small", Object.entries(span).find(([key, value]) => typeof value === "string" && key !== "word" && key !== "answer")?.[1] ?? ""));
    line.append(mark);
    end = span.end;
  }
  line.append(characters.slice(end).join(""));
  return line;
}

function showVector(name, values) {
  const picture = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  const top = Math.max(...values.map(Math.abs)) || 1;
  picture.setAttribute("viewBox", `0 -1 ${values.length} 2`);
  picture.setAttribute("preserveAspectRatio", "none");
  picture.classList.add("vector");
  path.setAttribute("d", values.map((value, index) => `M${index + .5} 0V${(-value / top).toFixed(3)}`).join(""));
  picture.append(path);
  const norm = Math.hypot(...values);
  return [make("p", `${name}: ${values.length} numbers, Euclidean norm ${norm.toFixed(4)}`), picture];
}

// Start

async function start() {
  for (;;) {
    let answer;
    try { answer = await ask("page/models"); } catch { answer = null; }
    if (answer?.ok) {
      const content = await answer.json();
      document.getElementById("unlock").hidden = true;
      document.getElementById("version").textContent = "Version " + content.version;
      document.title = "Laconic: " + content.models.map(model => model.name).join(", ");
      document.getElementById("models").replaceChildren();
      say("");
      await watch(new Map(content.models.map(model => [model.name, showModel(model)])));  // ends when models change
    } else {
      if (answer?.status !== 401) say("The server does not answer.");
      await new Promise(resolve => setTimeout(resolve, PERIOD));
    }
  }
}

document.getElementById("unlock").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("key", document.getElementById("key").value);
});

start();
