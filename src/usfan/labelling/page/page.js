"use strict";
// The page of `usfan label`: shows what the server says, and sends answers. Keys: 1-9, 0 or n, s, u, /; at the end a, m.
const at = (id) => document.getElementById(id);
const NONE = "none of these";
const SKIP = "skip";
const MATCHES = 7;
const HEARTBEAT = 15000;
const WATCH = 1000;

let classes = [];
let state = null;
let busy = false;
let endless = false;
let mine = [];
let current = 0;
let matches = [];
let timer = 0;

const windowName = sessionStorage.getItem("window") || crypto.randomUUID();
sessionStorage.setItem("window", windowName);

async function call(path, body) {
  const options = body && {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, window: windowName }),
  };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("No connection: start usfan label again. All answers so far are saved.");
  }
  const content = await response.json();
  if (!response.ok) throw new Error(content.error);
  return content;
}

async function refresh(path, body) {
  if (busy) return;
  busy = true;
  clearTimeout(timer);
  try {
    state = await call(path || `state?window=${windowName}`, body);
    at("problem").hidden = true;
    draw();
  } catch (error) {
    at("problem").textContent = error.message;
    at("problem").hidden = false;
  }
  busy = false;
  const soon = state && (state.learning || state.adapt.status === "running");
  timer = setTimeout(() => refresh(), soon ? WATCH : HEARTBEAT);
}

async function answer(label) {
  const question = state && state.questions[0];
  if (busy || !question || at("question").hidden) return;
  const rows = mine;
  mine = [...mine, question.row];
  await refresh("answer", { row: question.row, kind: question.kind, label });
  if (!at("problem").hidden) mine = rows;
  else say(state.note || `${label === SKIP ? "skipped" : label}: saved`);
}

async function undo() {
  if (busy || !state || state.last === null) return;
  const row = mine.length ? mine[mine.length - 1] : state.last;
  mine = mine.slice(0, -1);
  await refresh("undo", { row });
  say("taken back");
}

function say(text) {
  at("last").textContent = text;
}

function draw() {
  const ended = (state.done && !endless) || !state.questions.length;
  at("question").hidden = ended;
  at("end").hidden = !ended;
  if (ended) drawEnd();
  else drawQuestion(state.questions[0]);
  drawVerdict();
  drawAdapt();
  at("undo").disabled = at("end-undo").disabled = state.last === null;
}

function drawQuestion(question) {
  const asked = state.names - state.names_left;
  const order = state.names_left ? `name ${asked + 1} of ${state.names}` : "";
  at("why").textContent =
    question.kind === "name"
      ? `Names a group of similar images: the next adaptation learns from it${order && ` · ${order}`}`
      : "Drawn at random: shows which model is better; nothing learns from it";
  if (at("picture").dataset.row === String(question.row)) return;
  at("picture").dataset.row = question.row;
  showPicture(question.row);
  const all = classes.length <= 9; // then a class keeps its key
  const names = all ? classes : question.candidates;
  at("candidates").replaceChildren(...names.map(candidate));
  closeSearch();
  const next = state.questions[1];
  if (next) new Image().src = `image/${next.row}`;
}

function candidate(name, index) {
  const button = document.createElement("button");
  const key = document.createElement("kbd");
  const label = document.createElement("span");
  button.type = "button";
  button.dataset.label = name;
  key.textContent = index + 1;
  label.textContent = name;
  button.append(key, label);
  button.addEventListener("click", () => answer(name));
  return button;
}

function showPicture(row) {
  const picture = at("picture");
  picture.classList.add("waiting");
  picture.hidden = false;
  at("missing").hidden = true;
  picture.src = `image/${row}`;
}

at("picture").addEventListener("load", (event) => {
  const picture = event.target;
  picture.classList.remove("waiting");
  picture.classList.toggle("small", Math.max(picture.naturalWidth, picture.naturalHeight) < 100);
});

at("picture").addEventListener("error", async (event) => {
  const row = event.target.dataset.row;
  const response = await fetch(`image/${row}`);
  const reason = response.ok ? "" : await response.text();
  if (row !== event.target.dataset.row) return;
  event.target.hidden = true;
  at("missing").hidden = false;
  at("missing").textContent = `This file cannot be shown (${reason}). Skip it: key s.`;
});

function drawEnd() {
  const decided = state.verdict !== "not yet";
  const titles = {
    better: "Decided: the adapted model is better",
    worse: "Decided: the adapted model is worse",
    "no difference": "Decided: no difference worth having",
  };
  at("end-title").textContent = state.questions.length
    ? titles[state.verdict] || "The questions are answered"
    : "No images are left to ask about";
  const next = state.named ? "learns from the groups that you named" : "keeps the better model";
  at("end-text").textContent = decided
    ? `Adapt again: the next run ${next}. More answers make the intervals narrower.`
    : `It is not decided yet which model is better: about ${state.more} more answers. Or adapt again with these.`;
  at("more").hidden = !state.questions.length;
  at("picture").dataset.row = "";
}

function drawVerdict() {
  const decided = state.verdict !== "not yet";
  at("badge").textContent = state.verdict;
  at("badge").className = `badge ${state.verdict}`;
  at("sentence").textContent = state.sentence.replaceAll(" %", "\u00a0%");
  at("bars").hidden = !state.judged;
  for (const id of ["source", "adapted"]) drawBar(id, state[id], 0, 100);
  drawBar("difference", state.difference, -100, 100);
  at("answers").textContent = state.answers;
  at("left").textContent = decided && !state.names_left ? "none" : state.more;
  at("doubt").textContent = state.learning ? "…" : `${state.doubt.toFixed(0)} %`;
  const left = decided && !state.names_left ? state.verdict : `about ${state.more} to go`;
  at("brief").textContent = `${state.answers} saved · ${left}`;
}

function drawBar(id, [value, low, high], from, to) {
  const place = (x) => (100 * (x - from)) / (to - from);
  const sign = from < 0 ? "always" : "never";
  const show = (x) => x.toLocaleString("en", { maximumFractionDigits: 0, signDisplay: x ? sign : "never" }).replace("-", "−");
  const bar = at(id);
  bar.querySelector("output").textContent = `${show(value)} ${from < 0 ? "points" : "%"} (${show(low)} to ${show(high)})`;
  bar.querySelector(".range").style.left = `${place(low)}%`;
  bar.querySelector(".range").style.width = `${place(high) - place(low)}%`;
  bar.querySelector(".dot").style.left = `${place(value)}%`;
}

function drawAdapt() {
  const run = state.adapt;
  const texts = {
    idle: "The same adaptation, with what you answered. It takes as long as the first one; you can go on labelling.",
    running: run.line,
    failed: `It failed: ${run.line}`,
    done: run.line,
  };
  const typed = run.status === "idle" && run.missing;
  at("adapt-text").textContent = typed ? `Run this where ${run.missing} is:` : texts[run.status];
  at("command").hidden = !typed;
  at("command").textContent = run.command;
  at("adapt").hidden = Boolean(typed);
  at("adapt").disabled = run.status === "running" || !state.answers;
  at("adapt-label").textContent = run.status === "running" ? "Adapting …" : "Adapt again";
  at("adapt-key").hidden = at("end").hidden || at("adapt").disabled; // while labelling, a slip must not start it
}

function rank(name, words) {
  const text = name.toLowerCase();
  if (text === words) return 0;
  if (text.startsWith(words)) return 1;
  if (text.includes(` ${words}`) || text.includes(`_${words}`)) return 2;
  return text.includes(words) ? 3 : 9;
}

function drawMatches() {
  const words = at("search").value.trim().toLowerCase();
  matches = [];
  if (words) {
    const ranked = classes.map((name) => [rank(name, words), name]).filter(([r]) => r < 9);
    ranked.sort(([a], [b]) => a - b);
    matches = ranked.slice(0, MATCHES).map(([, name]) => name);
  }
  current = Math.min(current, Math.max(matches.length - 1, 0));
  const items = matches.map((name, index) => {
    const item = document.createElement("li");
    item.id = `match-${index}`;
    item.role = "option";
    item.ariaSelected = String(index === current);
    item.textContent = name;
    item.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      answer(name);
    });
    return item;
  });
  if (words && !items.length) {
    const item = document.createElement("li");
    item.className = "nothing";
    item.textContent = "no class matches";
    items.push(item);
  }
  at("matches").replaceChildren(...items);
  at("matches").hidden = !words;
  at("search").ariaExpanded = String(Boolean(words));
  at("search").setAttribute("aria-activedescendant", matches.length ? `match-${current}` : "");
}

function closeSearch() {
  at("search").value = "";
  at("search").blur();
  current = 0;
  drawMatches();
}

at("search").addEventListener("input", () => {
  current = 0;
  drawMatches();
});
at("search").addEventListener("blur", () => {
  at("matches").hidden = true;
});
at("search").addEventListener("focus", drawMatches);
at("search").addEventListener("keydown", (event) => {
  const steps = { ArrowDown: 1, ArrowUp: -1 };
  if (event.key in steps && matches.length) {
    current = (current + steps[event.key] + matches.length) % matches.length;
    drawMatches();
    event.preventDefault();
  } else if (event.key === "Enter" && matches.length) {
    answer(matches[current]);
  } else if (event.key === "Escape") {
    closeSearch();
  }
});

function askMore() {
  endless = true;
  draw();
}

at("none").addEventListener("click", () => answer(NONE));
at("skip").addEventListener("click", () => answer(SKIP));
at("undo").addEventListener("click", undo);
at("end-undo").addEventListener("click", undo);
at("more").addEventListener("click", askMore);
at("adapt").addEventListener("click", () => refresh("adapt", {}));

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.target === at("search")) return;
  const keys = { 0: () => answer(NONE), n: () => answer(NONE), s: () => answer(SKIP), u: undo, "/": () => at("search").focus() };
  if (!at("end").hidden) Object.assign(keys, { m: askMore, a: () => at("adapt").click() });
  const button = /^[1-9]$/.test(event.key) && at("candidates").children[event.key - 1];
  if (button) answer(button.dataset.label);
  else if (event.key in keys) keys[event.key]();
  else return;
  event.preventDefault();
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});

(async () => {
  try {
    const start = await call("classes");
    classes = start.classes;
    at("run").textContent = start.run;
    at("search").placeholder = `search all ${classes.length} classes`;
    document.title = `usfan label: ${start.run}`;
  } catch (error) {
    at("problem").textContent = error.message;
    at("problem").hidden = false;
    return;
  }
  await refresh();
  document.documentElement.dataset.ready = "1";
})();
