// The forms of the documentation of a graph. Each is made when its route is opened, and sends one request at a
// time. What comes back is shown as text, while it comes.
"use strict";

const LARGEST = 1_000_000; // characters of an answer that are shown
const HEADERS = ["content-type", "x-request-id", "x-session-id", "mcp-session-id", "retry-after", "allow"];
const PASS = { "X-Gym-Serve": "1" }; // with the cookie of /sign-in, what a page of the graph sends
const root = document.querySelector("main").dataset.root;

function made(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function field({ name, in: place, description, required }) {
  const input = made("input", { name, required, autocomplete: "off", spellcheck: false });
  const note = required ? description : `${description} (optional)`;
  return { input, place, label: made("label", {}, made("code", { textContent: name }), ` ${note}`, input) };
}

// Indented, with every number and every escape as it came: JSON.parse rounds large numbers.
function indented(json) {
  const indent = () => "\n" + "  ".repeat(depth);
  let depth = 0;
  let before = "";
  return json.replace(/"(?:\\.|[^"\\])*"|[^\s"{}[\],:]+|[{}[\],:]|\s+/g, (token) => {
    if (!token.trim()) return "";
    let text = token === ":" ? ": " : token;
    if ("}]".includes(token)) {
      depth -= 1;
      if (!"{[".includes(before)) text = indent() + token;
    } else if (before && "{[,".includes(before)) {
      text = indent() + text;
    }
    if ("{[".includes(token)) depth += 1;
    before = token;
    return text;
  });
}

function form(route) {
  const { method, path, fields, body, streams } = JSON.parse(route.dataset.form);
  const inputs = fields.map(field);
  const text = body === null ? null : made("textarea", { value: body, spellcheck: false });
  const send = made("button", { textContent: "Send" });
  const stop = made("button", { type: "button", textContent: "Stop", disabled: true });
  const status = made("p", { role: "status" });
  const answer = made("pre", { hidden: true });
  const controls = inputs.map((one) => one.label);
  if (text) {
    text.rows = Math.min(20, body.split("\n").length + 1);
    controls.push(made("label", {}, "Body", text));
  }
  if (streams) {
    const box = made("input", { type: "checkbox" });
    box.addEventListener("change", () => (text.value = withStream(text.value, box.checked)));
    controls.push(made("label", {}, box, " as a stream"));
  }
  const element = made("form", {}, ...controls, made("div", {}, send, stop));

  let running = null;
  stop.addEventListener("click", () => running.abort());
  element.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    running = new AbortController();
    send.disabled = !(stop.disabled = false);
    try {
      await exchange(request(method, path, inputs, text), running, status, answer);
    } finally {
      running = null;
      send.disabled = !(stop.disabled = true);
    }
  });
  return [element, made("div", { className: "answer" }, status, answer)];
}

function withStream(text, stream) {
  try {
    const body = JSON.parse(text);
    if (stream) body.stream = true;
    else delete body.stream;
    return JSON.stringify(body, null, 2);
  } catch {
    return text; // not JSON yet: the server will say so
  }
}

function request(method, path, inputs, text) {
  const headers = { ...PASS };
  const query = new URLSearchParams();
  for (const { input, place } of inputs) {
    if (place === "path") path = path.replace(`{${input.name}}`, encodeURIComponent(input.value));
    else if (place === "query" && input.value) query.set(input.name, input.value);
    else if (input.value) headers[input.name] = input.value;
  }
  if (text) headers["Content-Type"] = "application/json";
  const asked = query.size ? `?${query}` : "";
  return [root + path + asked, { method, headers, body: text ? text.value : undefined }];
}

async function exchange([url, options], running, status, answer) {
  const begun = performance.now();
  const shown = document.createTextNode("");
  answer.replaceChildren(shown);
  answer.hidden = true;
  status.textContent = "Waiting\u2026";
  let told = "";
  try {
    const response = await fetch(url, { ...options, signal: running.signal });
    told = `${response.status} ${response.statusText}`.trim();
    status.textContent = `${told}, reading\u2026`;
    const headers = HEADERS.filter((name) => response.headers.has(name));
    answer.prepend(headers.map((name) => `${name}: ${response.headers.get(name)}\n`).join("") + "\n");
    answer.hidden = false;
    await read(response, shown);
    told += `, ${Math.round(performance.now() - begun)} ms`;
    if (response.status === 401) told += ": reload the page to sign in";
  } catch (error) {
    told += running.signal.aborted ? " stopped" : ` ${error.message}`;
  }
  status.textContent = told.trim();
}

async function read(response, shown) {
  if (!response.body) return;
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  for (;;) {
    const { done, value } = await reader.read();
    shown.appendData(decoder.decode(value, { stream: !done }));
    if (done) break;
    if (shown.length > LARGEST) {
      shown.appendData(`\n\u2026 the rest is not shown: ${LARGEST} characters at most`);
      await reader.cancel();
      return;
    }
  }
  if ((response.headers.get("content-type") || "").startsWith("application/json")) {
    shown.data = indented(shown.data);
  }
}

for (const route of document.querySelectorAll("details.route")) {
  const open = () => route.querySelector(".command").after(...form(route));
  route.addEventListener("toggle", open, { once: true });
}

const token = document.getElementById("token");
if (token) {
  const leave = made("button", { type: "button", textContent: "Sign out" });
  leave.addEventListener("click", async () => {
    await fetch(`${root}/sign-in`, { method: "DELETE", headers: PASS });
    location.reload();
  });
  token.append(" ", leave);
}
