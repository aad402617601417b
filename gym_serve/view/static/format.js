// Numbers, sizes and times as people read them.

const WHOLE = new Intl.NumberFormat("en-US");
const NOTHING = "–";

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

export const count = (value) => (missing(value) ? NOTHING : WHOLE.format(value));
export const times = (value, one, many = one + "s") => `${count(value)} ${value === 1 ? one : many}`;

/** At most `digits` decimals, without zeros at the end. */
export function number(value, digits = 3) {
  if (missing(value)) return NOTHING;
  if (typeof value !== "number") return String(value);
  if (value !== 0 && (Math.abs(value) < 10 ** -digits || Math.abs(value) >= 1e9)) return value.toPrecision(3);
  return Number.isInteger(value) ? WHOLE.format(value) : String(Number(value.toFixed(digits)));
}

export const percent = (share) => (missing(share) ? NOTHING : `${number(share * 100, 1)} %`);

export function short(value) {
  if (missing(value)) return NOTHING;
  for (const [unit, size] of [["B", 1e9], ["M", 1e6], ["k", 1e4]])
    if (Math.abs(value) >= size) return number(value / (unit === "k" ? 1e3 : size), 1) + unit;
  return number(value, 1);
}

export function bytes(value) {
  if (missing(value)) return NOTHING;
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]])
    if (value >= size) return `${number(value / size, 1)} ${unit}`;
  return `${value} B`;
}

export function duration(seconds) {
  if (missing(seconds)) return NOTHING;
  if (seconds < 0.001) return `${number(seconds * 1e6, 0)} µs`;
  if (seconds < 1) return `${number(seconds * 1e3, seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 120) return `${number(seconds, seconds < 10 ? 2 : 1)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export const clock = (unix) => (missing(unix) ? NOTHING : new Date(unix * 1000).toLocaleString("en-GB"));

/** Versions of a policy in their order: 9 before 10, and step-9 before step-10. */
export const inOrder = (versions) => [...versions].sort(new Intl.Collator("en", { numeric: true }).compare);
