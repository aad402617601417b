// What decorates a text (colours of code, formulas) may take only so much time, since a model wrote the text: half a
// second at once, and a fifth of the time after that. What comes beyond it is shown plain.
const MOST = 500; // milliseconds
const SHARE = 0.2;

let left = MOST;
let seen = performance.now();

/** What `work` returns, or `plain()` where the time is spent. */
export function within(work, plain) {
  const begun = performance.now();
  left = Math.min(MOST, left + SHARE * (begun - seen));
  seen = begun;
  if (left <= 0) return plain();
  try {
    return work();
  } finally {
    seen = performance.now();
    left -= seen - begun;
  }
}
