// What a reader says of a rollout: tags, a comment, the reward that would be right. Kept beside the file.
import { get, send } from "./api.js";
import { html, useEffect, useState } from "./dom.js";
import { clock } from "./format.js";
import { useKeys } from "./keys.js";
import { visible } from "./text.js";

const NEW = { tags: [], comment: "", reward: null };

export function Annotation({ run, n, narrow = false }) {
  const [saved, setSaved] = useState(NEW);
  const [form, setForm] = useState({ tags: "", comment: "", reward: "" });
  const [status, setStatus] = useState("");
  const name = narrow ? "narrow-" : "";
  const show = (annotation) => {
    setSaved(annotation);
    setForm({ tags: (annotation.tags ?? []).join(", "), comment: annotation.comment ?? "", reward: annotation.reward ?? "" });
  };
  useEffect(() => {
    get(`annotations/${run}/${n}`).then((annotation) => show({ ...NEW, ...annotation }), (error) => setStatus(error.message));
  }, [run, n]);
  useKeys({ a: { does: "annotate", run: () => document.querySelector(matchMedia("(max-width: 900px)").matches ? "#narrow-comment" : "#comment")?.focus() } });
  const set = (key) => (event) => setForm({ ...form, [key]: event.target.value });
  const save = async (event) => {
    event.preventDefault();
    const reward = String(form.reward).trim();
    if (reward !== "" && !Number.isFinite(Number(reward))) return setStatus("The reward must be a number.");
    const body = { tags: form.tags.split(",").map((tag) => tag.trim()).filter(Boolean), comment: form.comment, reward: reward === "" ? null : Number(reward) };
    try {
      show({ ...NEW, ...(await send("PUT", `annotations/${run}/${n}`, body)) });
      setStatus("Saved.");
    } catch (error) {
      setStatus(error.message);
    }
    return undefined;
  };
  return html`<form class="card annotation" onSubmit=${save}><h2>Annotate</h2>
    <label for="${name}comment">Comment</label><textarea id="${name}comment" rows="3" dir="auto" value=${form.comment} onInput=${set("comment")}></textarea>
    <div class="two"><div><label for="${name}tags">Tags</label><input id="${name}tags" value=${form.tags} placeholder="judge wrong, hack" onInput=${set("tags")} /></div>
      <div><label for="${name}reward">Right reward</label><input id="${name}reward" inputmode="decimal" value=${form.reward} onInput=${set("reward")} /></div></div>
    <p class="buttons"><span class="muted small" role="status">${visible(status) || (saved.at ? `${saved.by ? visible(saved.by) + ", " : ""}${clock(saved.at)}` : "")}</span><button type="submit">Save</button></p></form>`;
}
