// Rollouts by keyboard: n or j opens the next one, p or k the previous one, without a reload; pictures open by a click.
const isTyping = (target) => target instanceof HTMLElement && target.matches("input, textarea, select, [contenteditable]");
let asked = 0;

const open = async (url, { push = true } = {}) => {
  asked += 1;
  const mine = asked;
  try {
    const answer = await fetch(url, { credentials: "same-origin" });
    if (!answer.ok || answer.redirected) throw new Error(String(answer.status));
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (mine !== asked) return; // a later key press was quicker
    const list = document.querySelector('[data-part="tasks"]');
    const scroll = list.scrollTop;
    for (const part of document.querySelectorAll("[data-part]")) {
      const other = fresh.querySelector(`[data-part="${part.dataset.part}"]`);
      if (!other) throw new Error("another page");
      part.replaceChildren(...other.childNodes);
    }
    list.scrollTop = scroll;
    list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
    if (push) history.pushState(null, "", url);
  } catch {
    location.assign(url);
  }
};

document.addEventListener(
  "keydown",
  (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || document.querySelector("dialog[open]")) return;
    const name = { n: "[data-next]", j: "[data-next]", p: "[data-previous]", k: "[data-previous]" }[event.key];
    const link = name && document.querySelector(name);
    if (!name || !document.querySelector('[data-part="transcript"]')) return;
    event.preventDefault();
    event.stopPropagation();
    if (link) open(link.href);
  },
  true,
);

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-picture]");
  if (button) {
    // The server offers data URLs of pictures only; this is the second look before one is shown.
    if (/^data:image\/(png|jpeg|gif|webp);base64,/.test(button.dataset.picture)) {
      const image = document.createElement("img");
      image.alt = "Image in the transcript";
      image.src = button.dataset.picture;
      button.replaceWith(image);
    }
    return;
  }
  const link = event.target.closest?.("a[data-rollout], a[data-next], a[data-previous]");
  if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey && event.button === 0) {
    event.preventDefault();
    open(link.href);
  }
});
document.addEventListener("change", (event) => event.target.matches("form[data-filters] select") && event.target.form.requestSubmit());
window.addEventListener("popstate", () => open(location.href, { push: false }));
