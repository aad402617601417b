// A static export has no server: the page reads its files, and filters and sorts by itself.
import { ApiError } from "./api.js";

const files = new Map();

function file(name) {
  if (!files.has(name))
    files.set(name, fetch(`api/${name}`).then((response) => {
      if (!response.ok) throw new ApiError(response.status, { message: `api/${name} is not in this export.` });
      return response;
    }));
  return files.get(name).then((response) => response.clone());
}

const json = async (name) => (await file(name)).json();
const asResponse = (value) => ({ json: async () => value });
const chosen = (runs) => ((list) => (run) => list.length === 0 || list.includes(run))([runs ?? []].flat());

/** What the server would answer. */
export async function answer(path, params) {
  const part = path.split("/");
  if (path === "summary") {
    const summary = await json("summary.json");
    return asResponse({ ...summary, runs: summary.runs.filter((run) => chosen(params.run)(run.id)) });
  }
  if (path === "rollouts" || path === "tasks") {
    const all = await json(`${path}.json`);
    const matches = path === "tasks" ? taskMatcher(params, await json("rollouts.json")) : rowMatcher(params);
    const rows = sorted(all.rows.filter(matches), params.sort);
    const offset = params.offset ?? 0;
    return asResponse({ ...all, total: rows.length, rows: rows.slice(offset, offset + (params.limit ?? 100)) });
  }
  if (path === "compare") return file(`compare/${params.left}/${params.right}.json`);
  if (part[0] === "rollout") {
    if (part[3] === "raw") return file(`${path}.txt`);
    const whole = await json(`${path}.json`);
    if (part[3] === "tokens") return asResponse({ ...whole, turns: whole.turns.slice(params.from ?? 0, params.to) });
    return params.from === undefined ? asResponse(whole) : asResponse({ ...whole, items: whole.items.slice(params.from, params.to) });
  }
  return file(`${path}.json`);
}

function sorted(rows, sort) {
  if (!sort) return rows;
  const down = sort.startsWith("-") ? -1 : 1;
  const name = sort.replace(/^-/, "");
  const missing = (value) => value === null || value === undefined;
  return [...rows].sort((a, b) => {
    const [x, y] = [field(a, name), field(b, name)];
    if (missing(x) || missing(y)) return missing(x) - missing(y);
    return (x < y ? -1 : x > y ? 1 : 0) * down;
  });
}

function field(row, name) {
  if (name.startsWith("fields.")) return row.fields?.[name.slice(7)];
  if (name === "tool") return row.tools;
  if (name === "tag") return row.marks;
  if (name === "text") return row.prompt;
  return row[name];
}

function rowMatcher({ run, where }) {
  const isChosen = chosen(run);
  const holds = condition(where);
  return (row) => isChosen(row.run) && holds(row);
}

function taskMatcher(params, { rows }) {
  const matches = rowMatcher(params);
  const kept = new Set(rows.filter(matches).map((row) => `${row.run}/${row.n}`));
  return (task) => task.rollouts.some((one) => kept.has(`${one.run}/${one.n}`));
}

// The filter language, in part: comparisons, words, and, or, not, parentheses.
const TOKEN = /\s*(?:([()])|(>=|<=|!=|=|>|<|~)|"((?:[^"\\]|\\.)*)"|([^\s()=<>!~"]+))/y;

/** The function of a row that an expression stands for. */
export function condition(text) {
  if (!text) return () => true;
  const tokens = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < text.trimEnd().length) {
    const at = TOKEN.lastIndex;
    const match = TOKEN.exec(text);
    if (!match) throw new ApiError(400, { message: "This cannot be read.", position: at });
    const [, bracket, operator, string, word] = match;
    tokens.push({ at, type: bracket ?? (operator ? "operator" : string !== undefined ? "string" : "word"), value: bracket ?? operator ?? (string !== undefined ? string.replace(/\\(.)/g, "$1") : word) });
  }
  let next = 0;
  const is = (value) => tokens[next]?.type === "word" && tokens[next].value.toLowerCase() === value;
  const wrong = (message) => {
    throw new ApiError(400, { message, position: tokens[next]?.at ?? text.length });
  };
  const either = () => {
    let left = all();
    while (is("or")) {
      next++;
      const [a, b] = [left, all()];
      left = (row) => a(row) || b(row);
    }
    return left;
  };
  const all = () => {
    let left = one();
    while (next < tokens.length && !is("or") && tokens[next].type !== ")") {
      if (is("and")) next++;
      const [a, b] = [left, one()];
      left = (row) => a(row) && b(row);
    }
    return left;
  };
  const one = () => {
    if (is("not")) {
      next++;
      const inner = one();
      return (row) => !inner(row);
    }
    const token = tokens[next++];
    if (!token) {
      next--;
      return wrong("The filter must go on here.");
    }
    if (token.type === "(") {
      const inner = either();
      if (tokens[next]?.type !== ")") wrong("A ) must stand here.");
      next++;
      return inner;
    }
    if (token.type === "word" && tokens[next]?.type === "operator") {
      const operator = tokens[next++].value;
      const value = tokens[next++];
      if (!value || !["word", "string"].includes(value.type)) return wrong(`${operator} must be followed by a value.`);
      return (row) => holds(field(row, token.value), operator, value.value);
    }
    if (token.type === "word" || token.type === "string") return (row) => holds(row.prompt, "~", token.value);
    next--;
    return wrong("A comparison or a word must stand here.");
  };
  const whole = either();
  if (next < tokens.length) wrong("The filter must end here.");
  return whole;
}

function holds(actual, operator, wanted) {
  if (Array.isArray(actual)) return operator === "!=" ? !actual.includes(wanted) : actual.some((one) => holds(one, operator, wanted));
  if (operator === "~") return String(actual ?? "").toLowerCase().includes(wanted.toLowerCase());
  if (typeof actual === "boolean") actual = String(actual);
  const isNumber = typeof actual === "number" && wanted !== "" && !Number.isNaN(Number(wanted));
  const [a, b] = isNumber ? [actual, Number(wanted)] : [actual === null || actual === undefined ? "" : String(actual), wanted];
  switch (operator) {
    case "=": return a === b;
    case "!=": return a !== b;
    case ">": return a > b && actual !== null;
    case ">=": return a >= b && actual !== null;
    case "<": return a < b && actual !== null;
    default: return a <= b && actual !== null;
  }
}
