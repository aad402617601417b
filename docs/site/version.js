// The selector of versions, beside the title; a warning on the pages of all but the newest version.
// `versions`, newest first, comes from versions.js beside the folders of the versions: a script, which pages from
// file:// may load. The classes are those of the theme.
"use strict";

(() => {
  if (typeof versions === "undefined") return; // the folder of one version alone
  const root = new URL(JSON.parse(document.getElementById("__config").textContent).base + "/", location.href);
  const current = root.pathname.split("/").at(-2);
  const page = location.href.slice(root.href.length).split(/[?#]/)[0] || "index.html";
  const address = ({name, pages}) => new URL(`../${name}/${pages.includes(page) ? page : "index.html"}`, root).href;

  const made = (tag, attributes, ...children) => {
    const element = Object.assign(document.createElement(tag), attributes);
    element.append(...children);
    return element;
  };
  const items = versions.map((version) =>
    made("li", {className: "md-version__item"},
      made("a", {className: "md-version__link", href: address(version)}, version.name)));
  document.querySelector(".md-header__topic").append(
    made("div", {className: "md-version"},
      made("button", {className: "md-version__current", ariaLabel: "Version"}, current),
      made("ul", {className: "md-version__list"}, ...items)));

  const [newest] = versions;
  if (current === newest.name) return;
  document.querySelector(".md-header").before(
    made("aside", {className: "md-banner md-banner--warning"},
      made("div", {className: "md-banner__inner md-grid md-typeset"},
        `These pages are of version ${current}. `,
        made("a", {href: address(newest)}, `The newest version is ${newest.name}.`))));
})();
