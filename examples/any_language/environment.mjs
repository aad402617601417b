// An environment in JavaScript: the model finds a number from 1 to 100, and is told "higher" or "lower".
//
//     node environment.mjs 8701
//
// It needs Node 18 or newer, and no packages. docs/formats.md says what its routes take and answer.

import { randomUUID } from "node:crypto";
import { createServer } from "node:http";

const MOST_BYTES = 64 * 2 ** 20;
const SESSION_SECONDS = 3600; // without a call

// The state of each episode, by the id of its session.
const sessions = new Map();

const guess = {
  type: "function",
  name: "guess",
  description: "Guess the number. The answer is right, higher or lower.",
  parameters: {
    type: "object",
    properties: { number: { type: "integer", minimum: 1, maximum: 100 } },
    required: ["number"],
    additionalProperties: false,
  },
};

// A failure, as docs/formats.md defines it. A model reads the message of a tool's.
class Failure extends Error {
  constructor(status, code, message) {
    super(message);
    Object.assign(this, { status, code });
  }
}

const routes = {
  // An agent asks for the tools if the row names none.
  seed_session(row) {
    const id = randomUUID();
    sessions.set(id, { id, number: row.number ?? 50, guesses: 0, found: false, used: Date.now() });
    return [row._ng_wants_tools ? { tools: [guess] } : {}, id];
  },

  guess({ number }, id) {
    const session = sessionOf(id);
    if (!Number.isInteger(number) || number < 1 || number > 100) {
      throw new Failure(422, "invalid_request", "number: must be an integer from 1 to 100");
    }
    session.guesses += 1;
    session.found ||= number === session.number;
    return [{ answer: number === session.number ? "right" : number < session.number ? "higher" : "lower" }, id];
  },

  // 1 for a number that was found with seven guesses, which are always enough; less for each further one.
  verify(body, id) {
    const { found, guesses } = sessionOf(id);
    const reward = found ? Math.max(0.1, 1 - 0.1 * Math.max(0, guesses - 7)) : 0;
    return [{ reward, guesses, ...(found ? {} : { reason: "the number was not found" }) }, id];
  },

  close_session(body, id) {
    sessions.delete(id);
    return [{}];
  },
};

function sessionOf(id) {
  const session = sessions.get(id);
  if (session === undefined) {
    // Not session_not_found, which is final: if this program was restarted, the episode must begin again.
    throw new Failure(409, "session_lost", "there is no such session, or no more: seed another one");
  }
  session.used = Date.now();
  return session;
}

async function bodyOf(request) {
  const chunks = [];
  let length = 0;
  for await (const chunk of request) {
    length += chunk.length;
    if (length <= MOST_BYTES) chunks.push(chunk);
  }
  if (length > MOST_BYTES) throw new Failure(413, "too_large", `the body has more than ${MOST_BYTES} bytes`);
  const text = Buffer.concat(chunks).toString();
  let body = {};
  try {
    if (text !== "" || !request.url.endsWith("/close_session")) body = JSON.parse(text);
  } catch (error) {
    throw new Failure(400, "bad_request", `the body must be JSON: ${error.message}`);
  }
  if (typeof body !== "object" || body === null || Array.isArray(body)) {
    throw new Failure(422, "invalid_request", "the body must be an object");
  }
  return body;
}

async function answer(request) {
  const name = request.url.slice(1);
  if (name === "reverify_mode" && request.method === "GET") return ["unsupported"];
  const body = await bodyOf(request);
  if (request.method !== "POST" || !Object.hasOwn(routes, name)) {
    throw new Failure(404, "not_found", "there is no such route or tool");
  }
  return routes[name](body, request.headers["x-session-id"]);
}

const server = createServer(async (request, response) => {
  let status = 200, value, session;
  try {
    [value, session] = await answer(request);
  } catch (error) {
    if (request.destroyed && !request.complete) return; // the client has left
    if (!(error instanceof Failure)) console.error(error);
    const { status: s = 500, code = "unavailable", message } = error;
    [status, value] = [s, { error: { code, message } }];
  }
  const headers = { "content-type": "application/json" };
  if (session) Object.assign(headers, { "x-session-id": session, "set-cookie": `gym_session=${session}` });
  response.writeHead(status, headers).end(JSON.stringify(value));
});

setInterval(() => {
  const late = Date.now() - 1000 * SESSION_SECONDS;
  for (const { id, used } of sessions.values()) if (used < late) sessions.delete(id);
}, 5000).unref();

server.listen(Number(process.argv[2] ?? 8701), "127.0.0.1", () => {
  console.log(`http://127.0.0.1:${server.address().port}`);
});
