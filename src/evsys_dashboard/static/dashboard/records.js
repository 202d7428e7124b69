// A page of one record while it grows: when the server names it among the changes, its parts are fetched again and put in
// place. Parts are `[data-part]`; those in which the visitor has opened something or is typing stay as they are.
import { watch } from "./live.js";

const root = document.querySelector("[data-watch-experiment], [data-watch-run]");

export const refresh = async () => {
  const answer = await fetch(location.href, { credentials: "same-origin" });
  if (!answer.ok || answer.redirected) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-part]")) {
    const other = fresh.querySelector(`[data-part="${CSS.escape(part.dataset.part)}"]`);
    if (!other || part.contains(document.activeElement) || part.innerHTML === other.innerHTML) continue;
    const log = part.querySelector("[data-log-tail]");
    const isAtEnd = log && log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    part.replaceChildren(...other.childNodes);
    const after = part.querySelector("[data-log-tail]");
    if (after && isAtEnd) after.scrollTop = after.scrollHeight;
  }
  document.dispatchEvent(new CustomEvent("evsys-changed"));
};

if (root) {
  const log = document.querySelector("[data-log-tail]");
  if (log) log.scrollTop = log.scrollHeight;
  const { watchExperiment, watchRun } = root.dataset;
  watch(({ experiments = [], runs = [] }) => {
    const isOurs = experiments.includes(watchExperiment) || runs.includes(watchRun) || runs.some((id) => document.querySelector(`[data-row="${CSS.escape(id)}"]`));
    return isOurs ? refresh() : undefined;
  }, { since: root.dataset.since }); // from the state that the page shows: a change before the first question counts
}
