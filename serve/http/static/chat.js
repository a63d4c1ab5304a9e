"use strict";

// The chat with a model that writes: its answers are shown as they come

function addChat(card, model) {
  const box = card.querySelector(".chat"), form = box.querySelector("form"), log = box.querySelector("ol");
  const [send, stop, again] = form.querySelectorAll("button"), area = form.querySelector("textarea"), status = form.querySelector(".time");
  const picture = form.querySelector(".picture"), input = picture.querySelector("input");
  const turns = [];
  let writing = null;
  area.id = "chat-" + model.name;
  form.querySelector("label").htmlFor = area.id;
  form.querySelector("label").textContent = model.chat ? "Message" : "Text to continue";
  input.id = "image-" + model.name;
  picture.querySelector("label").htmlFor = input.id;
  picture.hidden = !(model.chat && model.images);
  box.hidden = false;
  stop.addEventListener("click", () => writing?.abort());
  again.addEventListener("click", () => {
    writing?.abort();
    turns.length = 0;
    log.replaceChildren();
    status.textContent = "";
    input.value = "";
    area.focus();
  });
  area.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  form.addEventListener("submit", async event => {
    event.preventDefault();
    if (writing) return;
    const text = area.value, image = input.files[0] && await readAddress(input.files[0]);
    const content = image ? [{ type: "image_url", image_url: { url: image } }, { type: "text", text }] : text;
    addTurn(log, "user", text, image);
    const line = addTurn(log, "assistant", ""), messages = [...turns, { role: "user", content }];
    [area.value, input.value] = ["", ""];
    [send.disabled, stop.hidden] = [true, false];
    writing = new AbortController();
    const signal = writing.signal;
    try {
      const request = model.chat ? { messages } : { prompt: text };
      await showWriting(model, request, signal, line, status);
    } catch (error) {
      if (!signal.aborted) line.append(make("p", error.message, { class: "error" }));
      else status.textContent = "Stopped.";
    }
    const written = line.querySelector("p").textContent;
    if (written && log.contains(line)) turns.push(messages.at(-1), { role: "assistant", content: written });
    [send.disabled, stop.hidden, writing] = [false, true, null];
  });
}

function readAddress(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

function addTurn(log, role, text, image) {
  const line = make("li", undefined, { class: role });
  if (image) line.append(make("img", undefined, { alt: "The image of this message", src: image }));
  line.append(make("p", text));
  log.append(line);
  line.scrollIntoView({ block: "nearest" });
  return line;
}

async function showWriting(model, request, signal, line, status) {
  const path = model.chat ? "v1/chat/completions" : "v1/completions", started = performance.now();
  // The likeliest tokens: small models write nonsense at the default temperature of 1, and greedy answers are what was proven
  const settings = { temperature: 0, stream: true, stream_options: { include_usage: true } };
  const body = JSON.stringify({ model: model.name, ...request, ...settings });
  const answer = await ask(path, { method: "POST", body, signal, headers: { "content-type": "application/json" } });
  if (!answer.ok) throw new Error((await answer.json()).error?.message ?? String(answer.status));
  const shown = line.querySelector("p");
  let first = 0, reason = null;
  status.textContent = "";
  for await (const event of readEvents(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices, text = choice?.delta?.content ?? choice?.text;
    if (text) {
      first ||= performance.now();
      shown.append(text);
      line.scrollIntoView({ block: "nearest" });
    }
    reason = choice?.finish_reason ?? reason;
    if (event.usage) {
      const tokens = event.usage.completion_tokens, seconds = (performance.now() - first) / 1000;
      const rate = first && tokens > 1 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
      const wait = first ? `, the first after ${(first - started).toFixed(0)} ms` : "";
      status.textContent = `${tokens} tokens${wait}${rate}${reason === "length" ? "; cut at the most tokens" : ""}`;
    }
  }
}

async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
