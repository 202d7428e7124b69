// The list of experiments: more rows on scroll, rows that changed, columns and grouping without a click on Filter.
import { redraw } from "./keys.js";
import { watch } from "./live.js";

const list = document.querySelector("[data-list]");
const body = document.querySelector("[data-rows]");
const form = document.querySelector("[data-filter-form]");
const base = `${location.pathname}rows`;

const parse = (html) => {
  // Rows parse only inside a table body. A template's content runs no script and loads nothing.
  const holder = document.createElement("template");
  holder.innerHTML = `<table><tbody>${html}</tbody></table>`;
  return [...holder.content.querySelector("tbody").children];
};

const fetchRows = async (query) => {
  const answer = await fetch(`${base}?${query}`, { credentials: "same-origin", redirect: "error" });
  if (!answer.ok) throw new Error(`${answer.status}`);
  return parse(await answer.text());
};

const rowById = (id) => [...body.querySelectorAll("[data-row]")].filter((row) => row.dataset.row === id);

let isLoading = false;
const loadMore = async () => {
  const mark = body.querySelector("[data-more]");
  const link = mark?.querySelector("[data-more-link]");
  if (!link || isLoading) return;
  isLoading = true;
  link.textContent = "Loading ...";
  try {
    const found = await fetchRows(new URL(link.href).searchParams);
    // Rows shift when an experiment starts meanwhile: one that is there already is not shown twice.
    const isGrouped = Boolean(list.dataset.group);
    mark.replaceWith(...found.filter((row) => isGrouped || !row.dataset.row || !rowById(row.dataset.row).length));
    redraw();
    observe();
  } catch {
    link.textContent = "Could not load more rows. Try again";
  } finally {
    isLoading = false;
  }
};

const observer = new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && loadMore(), {
  rootMargin: "400px",
});
const observe = () => {
  observer.disconnect();
  const mark = body.querySelector("[data-more]");
  if (mark) observer.observe(mark);
};
document.addEventListener("evsys-last-row", loadMore);
body.addEventListener("click", (event) => {
  if (event.target.closest("[data-more-link]")) {
    event.preventDefault();
    loadMore();
  }
});

const currentQuery = () => {
  const query = new URLSearchParams(location.search);
  query.delete("from");
  return query;
};

const update = async ({ experiments = [] }) => {
  for (let at = 0; at < experiments.length; at += 100) {
    const ids = experiments.slice(at, at + 100);
    const query = currentQuery();
    for (const id of ids) query.append("id", id);
    const fresh = new Map((await fetchRows(query)).filter((row) => row.dataset.row).map((row) => [row.dataset.row, row]));
    for (const id of ids) {
      const row = fresh.get(id);
      const shown = rowById(id);
      // Gone from the filter, or deleted.
      if (!row) shown.forEach((one) => one.remove());
      shown.forEach((one) => {
        const isCursor = one.classList.contains("cursor");
        const isFocused = one.contains(document.activeElement);
        const copy = row?.cloneNode(true);
        if (!copy) return;
        one.replaceWith(copy);
        if (isCursor) copy.classList.add("cursor");
        if (isFocused) copy.querySelector("a[data-open]")?.focus({ preventScroll: true });
      });
      if (row && !shown.length) insert(row);
    }
  }
  list.hidden = false;
  const table = document.querySelector("[data-table]");
  if (body.querySelector("[data-row]")) {
    table.hidden = false;
    for (const empty of document.querySelectorAll(".empty")) empty.remove();
  }
  redraw();
};

// A new experiment stands at its place in a list by date; in another order it comes with the next visit.
const insert = (row) => {
  if (list.dataset.group || list.dataset.sort !== "-date") return;
  const next = [...body.querySelectorAll("[data-row]")].find(
    (one) => Number(one.dataset.created) < Number(row.dataset.created),
  );
  if (next) next.before(row);
  else if (!body.querySelector("[data-more]")) body.append(row);
};

form.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit]")) form.requestSubmit();
});
// Keep the address short: what is empty is left out, and the columns stand in one word unless they are the usual ones.
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const given = new FormData(form);
  const query = new URLSearchParams();
  for (const name of ["q", "group", "sort"]) if (given.get(name)) query.set(name, given.get(name));
  const boxes = [...form.querySelectorAll("input[name=cols]")];
  if (boxes.some((box) => box.checked !== box.defaultChecked) || new URLSearchParams(location.search).has("cols")) {
    query.set("cols", boxes.filter((box) => box.checked).map((box) => box.value).join(","));
  }
  location.assign(`${location.pathname}${query.size ? `?${query}` : ""}`);
});

observe();
watch(update, { since: list.dataset.cursor });
