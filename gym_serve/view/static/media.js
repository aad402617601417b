// Images and sounds that are inside a rollout. Nothing is loaded from elsewhere: an address is shown as text.
import { html } from "./dom.js";
import { Link } from "./link.js";
import { bytes } from "./format.js";
import { Name, visible } from "./text.js";

const IMAGE = /^data:image\/(png|jpeg|gif|webp|avif|bmp);base64,[A-Za-z0-9+/=\s]+$/i; // no SVG: it is a program
const SOUND = /^data:audio\/[a-z0-9.+-]+;base64,[A-Za-z0-9+/=\s]+$/i;
const LIMIT = 30e6; // characters

const inside = (pattern, source) => source.length < LIMIT && pattern.test(source.slice(0, 200)) && source;

function Elsewhere({ what, source, name }) {
  return html`<span class="elsewhere">${what} not shown${name && html`: <${Name}>${name}<//>`}${" "}
    ${/^data:/i.test(source) ? html`<span class="muted"><${Name} limit=${40}>${source}<//> (${bytes(source.length)})</span>`
      : html`<${Link} to=${source}><${Name} limit=${80}>${source}<//><//>`}</span>`;
}

export function Picture({ source, name }) {
  return inside(IMAGE, source ?? "")
    ? html`<img class="picture" src=${source} alt=${name || "image of the rollout"} loading="lazy" />`
    : html`<${Elsewhere} what="Image" source=${source ?? ""} name=${name} />`;
}

function Sound({ source, name }) {
  return inside(SOUND, source ?? "")
    ? html`<audio controls src=${source} aria-label=${name || "sound of the rollout"}></audio>`
    : html`<${Elsewhere} what="Sound" source=${source ?? ""} name=${name} />`;
}

/** A part of a message that is no text: {type, data, media_type}; `data` is a data: URL, base64, or an address. */
export function Part({ part }) {
  const { type, name, media_type: media } = part;
  const data = part.data ?? "";
  if (!data && part.bytes) return html`<span class="elsewhere">${type} of ${bytes(part.bytes)}, too large to be shown</span>`;
  const source = media && data && !/^[a-z]+:/i.test(data) ? `data:${media};base64,${data}` : data;
  if (type === "image") return html`<${Picture} source=${source} name=${name && visible(name)} />`;
  if (type === "audio") return html`<${Sound} source=${source} name=${name && visible(name)} />`;
  return html`<span class="elsewhere">${type} <${Name} limit=${80}>${name ?? part.text ?? source}<//></span>`;
}
