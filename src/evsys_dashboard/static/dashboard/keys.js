// Keyboard, row cursor and selection of every list; what a row is stands in base.html.
const rows = () => [...document.querySelectorAll("[data-row]")].filter((row) => row.offsetParent !== null);
const selected = new Set();
let cursor = null;

const isTyping = (target) =>
  target instanceof HTMLElement &&
  (target.isContentEditable ||
    target.matches("textarea, select, input:not([type=checkbox]):not([type=radio]):not([type=button])"));

const moveTo = (row) => {
  const before = document.querySelector("[data-row].cursor");
  before?.classList.remove("cursor");
  cursor = row?.dataset.row ?? null;
  if (!row) return;
  row.classList.add("cursor");
  row.scrollIntoView({ block: "nearest" });
  row.querySelector("a[data-open]")?.focus({ preventScroll: true });
};

const move = (by) => {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.classList.contains("cursor"));
  const next = at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + by));
  moveTo(all[next]);
  if (next === all.length - 1) document.dispatchEvent(new CustomEvent("evsys-last-row"));
};

const current = () => document.querySelector("[data-row].cursor");

// Rows may be replaced by live updates: the selection is kept by id and drawn again.
export const redraw = () => {
  for (const row of document.querySelectorAll("[data-row]")) {
    const isSelected = selected.has(row.dataset.row);
    row.classList.toggle("selected", isSelected);
    const box = row.querySelector("input[data-select]");
    if (box) box.checked = isSelected;
    if (cursor !== null && row.dataset.row === cursor && !current()) row.classList.add("cursor");
  }
  const bar = document.querySelector("[data-selection]");
  if (!bar) return;
  bar.hidden = selected.size === 0;
  bar.querySelector("[data-selection-count]").textContent = String(selected.size);
  bar.querySelector("[data-compare-button]").disabled = selected.size < 2;
};

export const select = (id, on = !selected.has(id)) => {
  if (on) selected.add(id);
  else selected.delete(id);
  redraw();
};

const compare = () => {
  const base = document.body.dataset.compare;
  if (!base || selected.size < 2) return;
  const query = new URLSearchParams([...selected].map((id) => ["e", id]));
  location.assign(`${base}?${query}`);
};

const clear = () => {
  selected.clear();
  moveTo(null);
  redraw();
};

const help = document.getElementById("help");
const openHelp = () => help?.showModal();

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || help?.open) return;
  if (isTyping(event.target)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const row = current();
  const acts = {
    "/": () => {
      const filter = document.querySelector("[data-filter]");
      filter?.focus();
      filter?.select?.();
      return Boolean(filter);
    },
    j: () => move(1) ?? true,
    k: () => move(-1) ?? true,
    x: () => {
      if (row?.querySelector("input[data-select]")) select(row.dataset.row);
      return Boolean(row);
    },
    c: () => compare() ?? true,
    Escape: () => clear() ?? true,
    "?": () => openHelp() ?? true,
    Enter: () => {
      // A focused link or button opens by itself.
      if (!row || event.target.closest?.("a, button, summary, input")) return false;
      row.querySelector("a[data-open]")?.click();
      return true;
    },
  };
  if (acts[event.key]?.()) event.preventDefault();
});

document.addEventListener("change", (event) => {
  const box = event.target.closest?.("input[data-select]");
  const row = box?.closest("[data-row]");
  if (row) select(row.dataset.row, box.checked);
});
document.addEventListener("click", (event) => {
  if (event.target.closest?.("[data-compare-button]")) compare();
  if (event.target.closest?.("[data-clear-button]")) clear();
  if (event.target.closest?.("[data-help]")) openHelp();
});
// Browsers restore ticked boxes when a page is gone back to.
for (const box of document.querySelectorAll("input[data-select]:checked")) {
  selected.add(box.closest("[data-row]").dataset.row);
}
redraw();
