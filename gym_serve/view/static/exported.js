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
  return row[name.toLowerCase()];
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

// The filter, in part: comparisons, LIKE, IS [NOT] NULL, tool(), tag(), words(), AND, OR, NOT, parentheses.
const TOKEN = /\s*(?:([()])|(<=|>=|<>|!=|==|=|<|>)|'((?:[^']|'')*)'|([\w.+-]+))/y;

/** The function of a row that a filter stands for. */
export function condition(text) {
  if (!text) return () => true;
  const tokens = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < text.trimEnd().length) {
    const at = TOKEN.lastIndex;
    const match = TOKEN.exec(text);
    if (!match) throw new ApiError(400, { message: "This cannot be read.", position: at });
    const [, bracket, operator, string, word] = match;
    tokens.push({ at, type: bracket ?? (operator ? "operator" : string !== undefined ? "string" : "word"), value: bracket ?? operator ?? string?.replaceAll("''", "'") ?? word });
  }
  let next = 0;
  const wrong = (message) => {
    throw new ApiError(400, { message, position: tokens[next]?.at ?? text.length });
  };
  /** Whether the next token is a word or a bracket, which is then taken. */
  const take = (value) => ["word", "(", ")"].includes(tokens[next]?.type) && tokens[next].value.toLowerCase() === value && ++next;
  const joined = (word, part, join) => () => {
    let left = part();
    while (take(word)) {
      const [a, b] = [left, part()];
      left = join(a, b);
    }
    return left;
  };
  const one = () => {
    if (take("not")) return negated(one());
    if (take("(")) {
      const inner = either();
      return take(")") ? inner : wrong("A ) must stand here.");
    }
    const name = tokens[next]?.type === "word" ? tokens[next++].value : wrong("A condition must stand here.");
    if (take("(")) {
      const value = tokens[next]?.type === "string" ? tokens[next++].value : wrong("A text in single quotes must stand here.");
      if (!take(")")) wrong("A ) must stand here.");
      if (name === "words") return (row) => value.toLowerCase().split(/[^\p{L}\p{N}]+/u).every((word) => row.prompt.toLowerCase().includes(word));
      return (row) => ((name === "tool" ? row.tools : name === "tag" ? row.marks : null) ?? wrong(`An export has no ${name}().`)).includes(value);
    }
    if (take("is")) {
      const given = take("not");
      return take("null") ? (row) => (field(row, name) ?? null) !== null === Boolean(given) : wrong("NULL must stand here.");
    }
    const without = take("not");
    const operator = take("like") ? "like" : tokens[next]?.type === "operator" && !without ? tokens[next++].value : wrong("A comparison must stand here.");
    const value = ["word", "string"].includes(tokens[next]?.type) ? tokens[next++] : wrong(`${operator} must be followed by a value.`);
    const compared = (row) => holds(field(row, name), operator, value.type === "word" ? Number(value.value) : value.value);
    return without ? negated(compared) : compared;
  };
  const all = joined("and", one, (a, b) => (row) => both(a(row), b(row)));
  const either = joined("or", all, (a, b) => (row) => negation(both(negation(a(row)), negation(b(row)))));
  const whole = either();
  if (next < tokens.length) wrong("The filter must end here.");
  return (row) => whole(row) === true;
}

// As in SQL, a comparison with what a row lacks is neither true nor false but null, and so is its negation.
const negation = (value) => (value === null ? null : !value);
const negated = (test) => (row) => negation(test(row));
const both = (a, b) => (a === false || b === false ? false : a === null || b === null ? null : true);

function holds(actual, operator, wanted) {
  if (actual === null || actual === undefined) return null;
  if (operator === "like") return new RegExp(`^${wanted.replace(/[^\w%]/g, "\\$&").replaceAll("_", ".").replaceAll("%", ".*")}$`, "is").test(actual);
  const given = typeof wanted === "number" ? Number(actual) : String(actual);
  switch (operator) {
    case "=": case "==": return given === wanted;
    case "!=": case "<>": return given !== wanted;
    case ">": return given > wanted;
    case ">=": return given >= wanted;
    case "<": return given < wanted;
    default: return given <= wanted;
  }
}
